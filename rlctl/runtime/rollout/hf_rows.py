"""Rows of the engine `hf`: the single responses of requests.

The caches of finished ones are kept, because their contexts may be continued later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from rlctl.runtime.rollout.kv_cache import Saved
from rlctl.runtime.rollout.requests import Completion, Request


class Row(NamedTuple):
    """One response of a request."""

    request: Request
    number: int  # among the request's n

    @property
    def max_tokens(self) -> int:
        """Limit of the response in tokens."""
        return self.request.max_tokens[self.number]


class Part(NamedTuple):
    """Responses of one request that join together, and the cache of its first tokens, if any."""

    request: Request
    indices: tuple[int, ...]
    saved: Saved | None = None


class Finished(NamedTuple):
    """Finished response, and the cache of its context if it was asked for."""

    row: Row
    completion: Completion
    saved: Saved | None  # of the context and all response tokens but the last


def rows_of(parts: Sequence[Part]) -> list[Row]:
    """Return the rows of all parts, in order."""
    return [Row(part.request, index) for part in parts for index in part.indices]


def parts_of(rows: Sequence[Row]) -> list[Part]:
    """Group adjacent rows of a request."""
    same = groupby(rows, key=lambda row: id(row.request))
    groups = [list(group) for _, group in same]
    return [Part(group[0].request, tuple(row.number for row in group)) for group in groups]


class _Parked(NamedTuple):
    ids: Tensor  # (L,) int64: the tokens that the cache was computed from
    saved: Saved
    num_bytes: int


class ParkedCaches:
    """KV caches of waiting episodes, by the key of their last request, up to `max_bytes`.

    The oldest are dropped first: their contexts are then computed again.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._by_key: dict[int, _Parked] = {}

    def __len__(self) -> int:
        """Return the number of caches."""
        return len(self._by_key)

    def put(self, request: Request, completion: Completion, saved: Saved) -> None:
        """Keep the cache of a finished request: of its context and response but the last token."""
        ids = torch.cat([request.context_ids, completion.response_ids[:-1]])
        num_bytes = sum(tensor.nbytes for layer in saved.values() for tensor in layer)
        self._by_key[request.key] = _Parked(ids, saved, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._by_key)))

    def take(self, request: Request) -> Saved | None:
        """Remove and return the cache of the first tokens of the request's context, if held."""
        if request.previous is None or request.previous not in self._by_key:
            return None
        parked = self._drop(request.previous)
        length = len(parked.ids)
        begins = length < len(request.context_ids) and torch.equal(
            request.context_ids[:length], parked.ids
        )
        return parked.saved if begins else None

    def clear(self) -> None:
        """Drop all caches."""
        self._by_key.clear()
        self.num_bytes = 0

    def _drop(self, key: int) -> _Parked:
        parked = self._by_key.pop(key)
        self.num_bytes -= parked.num_bytes
        return parked
