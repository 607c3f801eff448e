"""KV cache of one wave of responses, and attention over it.

The keys and values of a prompt are stored once for all its responses. All responses of a wave start
together, so at each step every row holds the same number of own tokens: that part of the cache is a
dense rectangle and needs no mask. Finished rows free their slots, and compaction moves the last
active rows into free slots, so little is copied and the rectangle stays dense.

Axes: G prompts (groups), R rows (responses), H query heads, K key-value heads, D head size,
P tokens of the longest prompt, t own tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlctl.runtime.model.attention import Packing

# Initial capacity of own tokens per row. It doubles, so memory follows the responses that are long.
_FIRST_CAPACITY = 64


@dataclass(eq=False)
class _Layer:
    """Cache of one layer. Slots after the active rows and groups hold stale data."""

    prompt_keys: Tensor  # (G, K, P, D)
    prompt_values: Tensor  # (G, K, P, D)
    keys: Tensor  # (R, K, capacity, D)
    values: Tensor  # (R, K, capacity, D)


@dataclass(frozen=True, eq=False)
class _Grid:
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
    ) -> _Grid:
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


@dataclass(eq=False)
class KVCache:
    """Keys and values of the active rows of a wave; attends one new token per row."""

    prompt_lengths: Tensor  # (G,) int64 on the CPU, of the active groups
    group_of_row: Tensor  # (R,) int64 on the CPU, of the active rows
    max_tokens: int  # limit of own tokens of any row
    num_own: int = 0  # own tokens t that every row holds
    _layers: list[_Layer] = field(default_factory=list)
    _grids: dict[tuple[int, int], _Grid] = field(default_factory=dict)

    def store_prompts(
        self, layer: int, group: Tensor, position: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Store keys and values (T, K, D) of prompt tokens, given their group and position (T,).

        Layers must be stored in order; the first call for a layer allocates its cache.
        """
        if layer == len(self._layers):
            self._layers.append(self._allocate(key, value))
        self._layers[layer].prompt_keys[group, :, position] = key
        self._layers[layer].prompt_values[group, :, position] = value

    def _allocate(self, key: Tensor, value: Tensor) -> _Layer:
        """Allocate a layer for keys and values like `key` and `value` (T, K, D)."""
        num_groups, num_rows = len(self.prompt_lengths), len(self.group_of_row)
        longest = int(self.prompt_lengths.max())
        capacity = min(_FIRST_CAPACITY, self.max_tokens)
        # Padding of prompts has weight 0, and 0 · uninitialized memory may be NaN.
        prompts = [x.new_zeros(num_groups, x.shape[1], longest, x.shape[2]) for x in (key, value)]
        own = [x.new_empty(num_rows, x.shape[1], capacity, x.shape[2]) for x in (key, value)]
        return _Layer(*prompts, *own)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend one new token per row: (R, H, D), (R, K, D), (R, K, D) -> (R, H, D).

        Scores over prompt and own tokens share one softmax, so this is plain attention over both.
        """
        (num_rows, num_heads, size), num_kv = query.shape, key.shape[1]
        rep = num_heads // num_kv
        held = self._layers[layer]
        grid = self._grids.get((num_kv, rep))
        if grid is None:
            grid = self._grids[num_kv, rep] = _Grid.build(
                self.group_of_row, self.prompt_lengths, (num_kv, rep), query
            )
        num_groups, num_prompt = len(self.prompt_lengths), grid.bias.shape[2]
        held.keys[:num_rows, :, self.num_own] = key
        held.values[:num_rows, :, self.num_own] = value
        own_keys = held.keys[:num_rows, :, : self.num_own + 1].flatten(0, 1)  # (R·K, t, D), a view
        own_values = held.values[:num_rows, :, : self.num_own + 1].flatten(0, 1)
        prompt_keys = held.prompt_keys[:num_groups, :, :num_prompt].flatten(0, 1)  # (G·K, P, D)
        prompt_values = held.prompt_values[:num_groups, :, :num_prompt].flatten(0, 1)

        query = (query * scale).reshape(num_rows * num_heads, size)
        in_grid = query.index_select(0, grid.to_grid).view(num_groups * num_kv, -1, size)
        prompt_scores = torch.baddbmm(grid.bias, in_grid, prompt_keys.transpose(1, 2))
        prompt_scores = prompt_scores.view(-1, num_prompt).index_select(0, grid.to_rows)
        per_kv = query.view(num_rows * num_kv, rep, size)
        own_scores = torch.bmm(per_kv, own_keys.transpose(1, 2)).view(num_rows * num_heads, -1)
        scores = torch.cat([prompt_scores, own_scores], 1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)  # (R·H, P + t)
        in_grid = weights.index_select(0, grid.to_grid)
        in_grid = in_grid.view(num_groups * num_kv, -1, weights.shape[1])
        from_prompt = torch.bmm(in_grid[..., :num_prompt], prompt_values)
        from_prompt = from_prompt.view(-1, prompt_values.shape[2])
        own_weights = weights.view(num_rows * num_kv, rep, -1)[..., num_prompt:]
        out = from_prompt.index_select(0, grid.to_rows).view(num_rows * num_kv, rep, -1)
        return out.baddbmm_(own_weights, own_values).view(num_rows, num_heads, -1)

    def advance(self) -> None:
        """Count the token that all layers attended, and grow the cache if it is full."""
        self.num_own += 1
        num_rows = len(self.group_of_row)
        for held in self._layers:
            capacity = held.keys.shape[2]
            if self.num_own < capacity:
                return
            larger = min(2 * capacity, self.max_tokens)
            held.keys = _with_capacity(held.keys[:num_rows], larger)
            held.values = _with_capacity(held.values[:num_rows], larger)

    def compact(self, active: Tensor) -> Tensor:
        """Keep the rows where `active` (R,) bool is True; return their old indices (R',)."""
        rows, free, moved = _compaction(active)
        for held in self._layers:
            held.keys[free, :, : self.num_own] = held.keys[moved, :, : self.num_own]
            held.values[free, :, : self.num_own] = held.values[moved, :, : self.num_own]
        self.group_of_row = self.group_of_row[rows]
        sizes = torch.bincount(self.group_of_row, minlength=len(self.prompt_lengths))
        self._compact_groups(sizes > 0)
        self._grids.clear()
        return rows

    def _compact_groups(self, active: Tensor) -> None:
        """Keep the groups where `active` (G,) bool is True."""
        if active.all():
            return
        groups, free, moved = _compaction(active)
        for held in self._layers:
            held.prompt_keys[free] = held.prompt_keys[moved]
            held.prompt_values[free] = held.prompt_values[moved]
        self.prompt_lengths = self.prompt_lengths[groups]
        new_index = torch.empty(len(active), dtype=torch.int64)
        new_index[groups] = torch.arange(len(groups))
        self.group_of_row = new_index[self.group_of_row]


@dataclass(eq=False)
class Prefill:
    """Attention within complete prompts, which also stores their keys and values in a cache.

    The packed prompts are the groups `first`, `first` + 1, … of `cache`.
    """

    cache: KVCache
    packing: Packing
    first: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend T packed prompt tokens: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
        lengths = self.packing.lengths
        group = self.first + torch.arange(len(lengths)).repeat_interleave(lengths)
        self.cache.store_prompts(layer, group.to(key.device), self.packing.position_ids, key, value)
        return self.packing.attend(layer, query, key, value, scale)


def _with_capacity(held: Tensor, capacity: int) -> Tensor:
    """Copy (R, K, t, D) into a new tensor (R, K, capacity, D)."""
    larger = held.new_empty(*held.shape[:2], capacity, held.shape[3])
    larger[:, :, : held.shape[2]] = held
    return larger


def _compaction(active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plan moves that make the slots where `active` (N,) bool is True contiguous.

    Returns the old index of each new slot (N',), and the moves `free` <- `moved` (M,): free slots
    below N' are filled with the last active ones.
    """
    count = int(active.sum())
    order = torch.arange(count)
    free = (~active[:count]).nonzero().squeeze(1)
    moved = active[count:].nonzero().squeeze(1) + count
    order[free] = moved
    return order, free, moved
