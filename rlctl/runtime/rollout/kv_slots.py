"""Indices of one decoding step in the KV cache of the engine `hf`.

Axes: G prompts (groups), R rows (responses), K key-value heads, P tokens of the longest prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlctl.runtime.base.ops import to_device


class StepShape(NamedTuple):
    """Sizes of the tensors of a decoding step, real slots and padding together."""

    rows: int
    groups: int
    width: int  # rows of a group
    prompt: int  # tokens
    response: int  # tokens


def bucket(count: int) -> int:
    """Return the least size of steps for `count` slots: 2ⁿ or 3·2ⁿ, so a third is wasted at most.

    >>> [bucket(count) for count in (0, 1, 3, 5, 7, 100)]
    [1, 1, 3, 6, 8, 128]
    """
    size = 1
    while size < count:
        size *= 2
    smaller = size // 4 * 3
    return smaller if 0 < count <= smaller else size


@dataclass(frozen=True, eq=False)
class Grid:
    """Permutation of query rows that gives every group `width` slots, for one product per prompt.

    An empty slot repeats the query of some row; its result is not read.
    """

    to_grid: Tensor  # (G·K·width·rep,): index into (R, K, rep) for each slot of (G, K, width, rep)
    to_rows: Tensor  # (R·K·rep,): the inverse
    bias: Tensor  # (G·K, 1, P): -inf after the end of a prompt

    @classmethod
    def build(
        cls,
        group_of_row: Tensor,
        prompt_lengths: Tensor,
        heads: tuple[int, int],
        like: Tensor,
        shape: StepShape | None = None,
    ) -> Grid:
        """Build the grid from group_of_row (R,) and prompt_lengths (G,) on the CPU.

        `heads` is (K, rep) with rep = H / K; the result has the device and dtype of `like`.
        `shape` has at least the sizes of the given rows, which is the default.
        """
        num_rows = len(group_of_row)
        num_kv, rep = heads
        counts = torch.bincount(group_of_row, minlength=len(prompt_lengths))
        if shape is None:
            width = int(counts.max())
            longest = int(prompt_lengths.max())
            shape = StepShape(num_rows, len(prompt_lengths), width, longest, 0)
        rows, groups, width, longest, _ = shape
        order = group_of_row.argsort(stable=True)
        slot = torch.empty_like(order)  # of each row within its group
        slot[order] = torch.arange(num_rows) - (counts.cumsum(0) - counts)[group_of_row[order]]
        row_at = torch.zeros(groups * width, dtype=torch.int64)
        row_at[group_of_row * width + slot] = torch.arange(num_rows)
        kv = torch.arange(num_kv)[:, None, None]
        head = torch.arange(rep)
        to_grid = (row_at.view(groups, 1, width, 1) * num_kv + kv) * rep + head
        # Rows beyond the real ones read the first slot of the first group.
        group, slot = (_padded(column, rows) for column in (group_of_row, slot))
        group_kv = group[:, None, None] * num_kv + kv.view(-1, 1)
        to_rows = (group_kv * width + slot[:, None, None]) * rep + head
        padding = torch.arange(longest) >= _padded(prompt_lengths, groups)[:, None]
        bias = torch.zeros(padding.shape).masked_fill_(padding, -torch.inf)
        return cls(
            to_device(to_grid.flatten(), like.device),
            to_device(to_rows.flatten(), like.device),
            to_device(bias.repeat_interleave(num_kv, 0)[:, None].to(like.dtype), like.device),
        )

    def copy_(self, other: Grid) -> None:
        """Overwrite the tensors with those of a grid of the same sizes."""
        self.to_grid.copy_(other.to_grid)
        self.to_rows.copy_(other.to_rows)
        self.bias.copy_(other.bias)


def _padded(values: Tensor, size: int) -> Tensor:
    return torch.cat([values, values.new_zeros(size - len(values))])


def outside_window(
    window: int, contexts: Tensor, num_own: Tensor, slots: tuple[int, int]
) -> Tensor:
    """Return a mask (R, P + t) bool of the slots that a window hides from the token of each row.

    `contexts` (R,) are the tokens of each row's prompt, `num_own` (R,) those of its response before
    this one, `slots` (P, t). Slots without a token may be in the window.
    """
    of_prompt, of_response = (torch.arange(count, device=num_own.device) for count in slots)
    distance = [(contexts + num_own)[:, None] - of_prompt, num_own[:, None] - of_response]
    return torch.cat(distance, 1) >= window


@dataclass(frozen=True, eq=False)
class OwnSlots:
    """Slots of the responses in one step: position of each row's new token, and the mask."""

    width: int  # tokens of the longest response, including the new one, or more
    slot: Tensor | None  # (R·K,) int64: of the new token; None: the last of `width` for all
    bias: Tensor | None  # (R·K, 1, width): -inf after the new token; None if `slot` is

    @classmethod
    def build(
        cls, num_own: Tensor, like: Tensor, capacity: int, width: int | None = None
    ) -> OwnSlots:
        """Build from the response tokens before the step, `num_own` (R,), with the dtype of `like`.

        `like` (R, K, D) are the new keys, and rows have slots for `capacity` response tokens.
        Without a `width`, it is the least one, and `num_own` is on the CPU.
        """
        num_kv = like.shape[1]
        if width is None:
            width = int(num_own.max()) + 1
            if bool((num_own == width - 1).all()):
                return cls(width, None, None)
        device = num_own.device
        after = torch.arange(width, device=device) > num_own[:, None]
        bias = torch.zeros(after.shape, device=device).masked_fill_(after, -torch.inf)
        rows_and_heads = torch.arange(len(num_own) * num_kv, device=device)
        slot = rows_and_heads * capacity + num_own.repeat_interleave(num_kv)
        return cls(width, slot.to(like.device), bias.repeat_interleave(num_kv, 0)[:, None].to(like))

    def write(self, held: Tensor, new: Tensor) -> None:
        """Write `new` (R, K, D) into the slots of `held` (≥ R, K, capacity, D)."""
        if self.slot is None:
            held[: len(new), :, self.width - 1] = new
        else:
            held.view(-1, new.shape[2]).index_copy_(0, self.slot, new.flatten(0, 1))
