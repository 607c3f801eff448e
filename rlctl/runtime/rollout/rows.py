"""Rows of the engine `hf`: the single responses of requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

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
