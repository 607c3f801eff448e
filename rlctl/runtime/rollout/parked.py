"""Caches of finished responses whose contexts may be continued later."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlctl.runtime.rollout.kv_cache import Saved
from rlctl.runtime.rollout.requests import Completion, Request


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
