"""Packed sequences as the rows of rectangles that are padded on the right.

What reads a sequence from its start and only looks back, such as causal attention, never reads the
padding, so it needs no mask.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlctl.runtime.base.ops import to_device

# Sequences share a rectangle if the longest exceeds the shortest by at most this factor, or by
# this many tokens.
_GROWTH = 1.1
_SLACK = 4


@dataclass(frozen=True, eq=False)
class Rectangle:
    """`rows` sequences of similar length, padded to `width` tokens."""

    rows: int
    width: int


class Rectangles(NamedTuple):
    """All sequences in rectangles of S slots in total."""

    shapes: list[Rectangle]
    tokens: Tensor  # (S,) int64: token in each slot; padding repeats the last token
    slots: Tensor  # (T,) int64: slot of each token

    @classmethod
    def from_lengths(
        cls, lengths: Tensor, device: torch.device, only_one: bool = False
    ) -> Rectangles:
        """Put sequences of `lengths` (B,) tokens, on the CPU, into as few rectangles as useful."""
        starts = lengths.cumsum(0) - lengths
        shapes: list[Rectangle] = []
        tokens: list[Tensor] = []
        slots = torch.empty(int(lengths.sum()), dtype=torch.int64)
        num_slots = 0
        sets = similar(lengths)
        if only_one and sets:
            sets = [torch.cat(sets)]
        for rows in sets:
            width = int(lengths[rows[-1]])
            column = torch.arange(width)
            last = lengths[rows, None] - 1
            token = starts[rows, None] + torch.minimum(column, last)  # (rows, width)
            real = column < lengths[rows, None]
            slots[token[real]] = num_slots + real.flatten().nonzero().squeeze(1)
            tokens.append(token.flatten())
            shapes.append(Rectangle(len(rows), width))
            num_slots += len(rows) * width
        return cls(shapes, to_device(join_indices(tokens), device), to_device(slots, device))


def join_indices(parts: Sequence[Tensor]) -> Tensor:
    """Return index tensors (N,) int64, none or several, as one."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def similar(lengths: Tensor) -> list[Tensor]:
    """Split sequences of `lengths` (B,), without empty ones, into sets of similar length.

    Returns index tensors (N,) int64, shortest sequences first.
    """
    order = lengths.argsort(stable=True)
    order = order[lengths[order] > 0]
    ascending = lengths[order].tolist()
    sets = []
    first = 0
    while first < len(ascending):
        limit = max(ascending[first] * _GROWTH, ascending[first] + _SLACK)
        end = bisect_right(ascending, limit, first)
        sets.append(order[first:end])
        first = end
    return sets
