"""Indices of one decoding step in the KV cache of the engine `hf`.

Axes: G prompts (groups), R rows (responses), K key-value heads, P tokens of the longest prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Grid:
    """Permutation of query rows that gives every group `width` slots, for one product per prompt.

    An empty slot repeats the query of some row; its result is not read.
    """

    width: int
    to_grid: Tensor  # (G·K·width·rep,): index into (R, K, rep) for each slot of (G, K, width, rep)
    to_rows: Tensor  # (R·K·rep,): the inverse
    bias: Tensor  # (G·K, 1, P): -inf after the end of a prompt

    @classmethod
    def build(
        cls, group_of_row: Tensor, prompt_lengths: Tensor, heads: tuple[int, int], like: Tensor
    ) -> Grid:
        """Build the grid from group_of_row (R,) and prompt_lengths (G,) on the CPU.

        `heads` is (K, rep) with rep = H / K; the result has the device and dtype of `like`.
        """
        num_groups, num_rows, (num_kv, rep) = len(prompt_lengths), len(group_of_row), heads
        counts = torch.bincount(group_of_row, minlength=num_groups)
        width = int(counts.max())
        order = group_of_row.argsort(stable=True)
        slot = torch.empty_like(order)  # of each row within its group
        slot[order] = torch.arange(num_rows) - (counts.cumsum(0) - counts)[group_of_row[order]]
        row_at = torch.zeros(num_groups * width, dtype=torch.int64)
        row_at[group_of_row * width + slot] = torch.arange(num_rows)
        kv, head = torch.arange(num_kv)[:, None, None], torch.arange(rep)
        to_grid = (row_at.view(num_groups, 1, width, 1) * num_kv + kv) * rep + head
        group_kv = group_of_row[:, None, None] * num_kv + kv.view(-1, 1)
        to_rows = (group_kv * width + slot[:, None, None]) * rep + head
        padding = torch.arange(int(prompt_lengths.max())) >= prompt_lengths[:, None]
        bias = torch.zeros(padding.shape).masked_fill_(padding, -torch.inf)
        return cls(
            width,
            to_grid.flatten().to(like.device),
            to_rows.flatten().to(like.device),
            bias.repeat_interleave(num_kv, 0)[:, None].to(like),
        )


@dataclass(frozen=True, eq=False)
class OwnSlots:
    """Slots of the own tokens of one step: position of each row's new token, and the mask."""

    width: int  # own tokens of the longest row, including the new one
    slot: Tensor | None  # (R·K,) int64: of the new token; None: the last of `width` for all
    bias: Tensor | None  # (R·K, 1, width): -inf after the new token; None if `slot` is

    @classmethod
    def build(cls, num_own: Tensor, like: Tensor, capacity: int) -> OwnSlots:
        """Build from the number of own tokens before the step (R,), with the dtype of `like`.

        `like` (R, K, D) are the new keys, and rows have slots for `capacity` own tokens.
        """
        width, num_kv = int(num_own.max()) + 1, like.shape[1]
        if bool((num_own == width - 1).all()):
            return cls(width, None, None)
        after = torch.arange(width) > num_own[:, None]
        bias = torch.zeros(after.shape).masked_fill_(after, -torch.inf)
        rows_and_heads = torch.arange(len(num_own) * num_kv)
        slot = rows_and_heads * capacity + num_own.repeat_interleave(num_kv)
        return cls(width, slot.to(like.device), bias.repeat_interleave(num_kv, 0)[:, None].to(like))

    def write(self, held: Tensor, new: Tensor) -> None:
        """Write `new` (R, K, D) into the slots of `held` (≥ R, K, capacity, D)."""
        if self.slot is None:
            held[: len(new), :, self.width - 1] = new
        else:
            held.view(-1, new.shape[2]).index_copy_(0, self.slot, new.flatten(0, 1))
