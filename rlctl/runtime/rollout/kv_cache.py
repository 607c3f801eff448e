"""The keys and values of one wave of answers, and attention over them.

A prompt's keys are held once for all its answers. All answers of a wave start together, so at each step every answer has the same
number of tokens of its own: that part of the cache is a rectangle and needs no mask. Answers that are done leave it: the last rows move
into their places, so little is copied and the rectangle stays dense.

G prompts (groups), R rows (answers), H query heads, K key-value heads, D head size, P longest prompt, t own tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlctl.runtime.model.attention import Packing

_FIRST_CAPACITY = 64  # own tokens a row has place for at first; it doubles, so that memory follows the answers that are long


@dataclass(eq=False)
class _Layer:
    """One layer's cache. Rows and groups behind the living ones hold what is left of the dead."""

    prompt_keys: Tensor  # (G, K, P, D)
    prompt_values: Tensor
    keys: Tensor  # (R, K, capacity, D)
    values: Tensor


@dataclass(frozen=True, eq=False)
class _Grid:
    """The rows of each group side by side, `width` places a group, so that a prompt meets all its queries in one product.

    A place without a row repeats some row's query; what it gives is not read.
    """

    width: int
    to_grid: Tensor  # (G·K·width·rep,): the place in (R, K, rep) that stands in a place of (G, K, width, rep)
    to_rows: Tensor  # (R·K·rep,): the other way
    bias: Tensor  # (G·K, 1, P): -inf behind a prompt's end

    @classmethod
    def build(
        cls, group_of_row: Tensor, prompt_lengths: Tensor, heads: tuple[int, int], like: Tensor
    ) -> _Grid:
        """`heads` is (K, H / K); made on the CPU and sent to where `like` is."""
        num_groups, num_rows, (num_kv, rep) = len(prompt_lengths), len(group_of_row), heads
        counts = torch.bincount(group_of_row, minlength=num_groups)
        width = int(counts.max())
        order = group_of_row.argsort(stable=True)
        rank_info = torch.empty_like(order)  # of a row in its group
        rank_info[order] = torch.arange(num_rows) - (counts.cumsum(0) - counts)[group_of_row[order]]
        row_at = torch.zeros(num_groups * width, dtype=torch.int64)
        row_at[group_of_row * width + rank_info] = torch.arange(num_rows)
        kv, head = torch.arange(num_kv)[:, None, None], torch.arange(rep)
        to_grid = (row_at.view(num_groups, 1, width, 1) * num_kv + kv) * rep + head
        to_rows = (
            (group_of_row[:, None, None] * num_kv + kv.view(-1, 1)) * width
            + rank_info[:, None, None]
        ) * rep + head
        behind = torch.arange(int(prompt_lengths.max())) >= prompt_lengths[:, None]
        bias = (
            torch.zeros(behind.shape)
            .masked_fill_(behind, -torch.inf)
            .repeat_interleave(num_kv, 0)[:, None]
        )
        return cls(
            width,
            to_grid.flatten().to(like.device),
            to_rows.flatten().to(like.device),
            bias.to(like),
        )


@dataclass(eq=False)
class KVCache:
    """`prompt_lengths` (G,) and `group_of_row` (R,), both on the CPU, are the living groups and rows."""

    prompt_lengths: Tensor
    group_of_row: Tensor
    max_tokens: int  # the most own tokens that any row will have
    num_own: int = 0
    _layers: list[_Layer] = field(default_factory=list)
    _grids: dict[tuple[int, int], _Grid] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One new token of every row: (R, H, D), (R, K, D), (R, K, D) -> (R, H, D).

        Both parts of the scores go through one softmax, so this is plain attention over prompt and own tokens.
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
        gathered = query.index_select(0, grid.to_grid).view(num_groups * num_kv, -1, size)
        on_prompt = torch.baddbmm(grid.bias, gathered, prompt_keys.transpose(1, 2)).view(
            -1, num_prompt
        )
        on_own = torch.bmm(query.view(num_rows * num_kv, rep, size), own_keys.transpose(1, 2)).view(
            num_rows * num_heads, -1
        )
        scores = torch.cat([on_prompt.index_select(0, grid.to_rows), on_own], 1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)  # (R·H, P + t)
        in_grid = weights.index_select(0, grid.to_grid).view(
            num_groups * num_kv, -1, weights.shape[1]
        )
        from_prompt = torch.bmm(in_grid[..., :num_prompt], prompt_values).view(
            -1, prompt_values.shape[2]
        )
        own_weights = weights.view(num_rows * num_kv, rep, -1)[..., num_prompt:]
        out = (
            from_prompt.index_select(0, grid.to_rows)
            .view(num_rows * num_kv, rep, -1)
            .baddbmm_(own_weights, own_values)
        )
        return out.view(num_rows, num_heads, -1)

    def advance(self) -> None:
        """All layers have seen the step's token: make room for the next."""
        self.num_own += 1
        num_rows = len(self.group_of_row)
        for held in self._layers:
            capacity = held.keys.shape[2]
            if self.num_own < capacity:
                return
            larger = min(2 * capacity, self.max_tokens)
            held.keys = _with_capacity(held.keys[:num_rows], larger)
            held.values = _with_capacity(held.values[:num_rows], larger)

    def keep(self, alive: Tensor) -> Tensor:
        """Only the rows where `alive` (R,) go on. Returns the rows (R',), in their new order, by their old numbers."""
        rows, holes, movers = _fill_holes(alive)
        for held in self._layers:
            held.keys[holes, :, : self.num_own] = held.keys[movers, :, : self.num_own]
            held.values[holes, :, : self.num_own] = held.values[movers, :, : self.num_own]
        self.group_of_row = self.group_of_row[rows]
        self._keep_groups(torch.bincount(self.group_of_row, minlength=len(self.prompt_lengths)) > 0)
        self._grids.clear()
        return rows

    def _keep_groups(self, alive: Tensor) -> None:
        if alive.all():
            return
        groups, holes, movers = _fill_holes(alive)
        for held in self._layers:
            held.prompt_keys[holes] = held.prompt_keys[movers]
            held.prompt_values[holes] = held.prompt_values[movers]
        self.prompt_lengths = self.prompt_lengths[groups]
        number = torch.empty(len(alive), dtype=torch.int64)
        number[groups] = torch.arange(len(groups))
        self.group_of_row = number[self.group_of_row]


@dataclass(eq=False)
class Prefill:
    """Attention of whole prompts among themselves that leaves their keys and values in `cache`: groups `first` and following."""

    cache: KVCache
    packing: Packing
    first: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        layers, num_groups = self.cache._layers, len(self.cache.prompt_lengths)
        if layer == len(layers):
            longest, num_rows = int(self.cache.prompt_lengths.max()), len(self.cache.group_of_row)
            capacity = min(_FIRST_CAPACITY, self.cache.max_tokens)
            layers.append(
                _Layer(
                    *(
                        x.new_zeros(num_groups, x.shape[1], longest, x.shape[2])
                        for x in (key, value)
                    ),  # zeros: 0 · padding must be 0
                    *(
                        x.new_empty(num_rows, x.shape[1], capacity, x.shape[2])
                        for x in (key, value)
                    ),
                )
            )
        lengths = self.packing.lengths
        group = (self.first + torch.arange(len(lengths)).repeat_interleave(lengths)).to(key.device)
        layers[layer].prompt_keys[group, :, self.packing.position_ids] = key
        layers[layer].prompt_values[group, :, self.packing.position_ids] = value
        return self.packing.attend(layer, query, key, value, scale)


def _with_capacity(held: Tensor, capacity: int) -> Tensor:
    """(R, K, t, D) with place for `capacity` tokens."""
    larger = held.new_empty(*held.shape[:2], capacity, held.shape[3])
    larger[:, :, : held.shape[2]] = held
    return larger


def _fill_holes(alive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How the last of the living fill the places of the dead: the new order (by old numbers), and the moves `holes` ← `movers`."""
    count = int(alive.sum())
    order = torch.arange(count)
    holes = (~alive[:count]).nonzero().squeeze(1)
    movers = alive[count:].nonzero().squeeze(1) + count
    order[holes] = movers
    return order, holes, movers
