"""KV cache of the running responses of the engine `hf`, and attention over it.

The keys and values of a prompt are stored once for all its responses. A row holds one response:
the keys and values of its own tokens follow those of its prompt. Rows may join at any step. While
all rows hold the same number of own tokens, as in a batch that started together, that part of the
cache is a dense rectangle and needs no mask. Finished rows free their slots, and compaction moves
the last rows into them, so little is copied and the rows stay contiguous.

Axes: G prompts (groups), R rows (responses), H query heads, K key-value heads, D head size,
P tokens of the longest prompt, t own tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlctl.runtime.rollout.kv_slots import Grid, OwnSlots

# Initial capacity of own tokens per row. It doubles, so memory follows the responses that are long.
_FIRST_CAPACITY = 64
# Keys and values of every layer, each (K, L, D): the cache of one row with its prompt.
Saved = list[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class _Layer:
    """Cache of one layer. Slots after the active rows and groups hold stale data."""

    prompt_keys: Tensor  # (G, K, P, D)
    prompt_values: Tensor  # (G, K, P, D)
    keys: Tensor  # (R, K, capacity, D)
    values: Tensor  # (R, K, capacity, D)

    def clear_own(self, rows: int, width: int) -> None:
        """Set the slots of own tokens to 0 except the first `width` of the first `rows`."""
        for held in (self.keys, self.values):
            held[rows:] = 0
            held[:, :, width:] = 0


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class KVCache:
    """Keys and values of prompts and rows; attends one new token per row.

    Unused slots hold finite values where they are masked: 0 · NaN would be NaN.
    """

    prompt_lengths: Tensor = field(default_factory=_none)  # (G,) int64, CPU: of active groups
    group_of_row: Tensor = field(default_factory=_none)  # (R,) int64, CPU: of active rows
    num_own: Tensor = field(default_factory=_none)  # (R,) int64, CPU: own tokens of each row
    max_own: int = 0  # limit of own tokens of any row
    _layers: list[_Layer] = field(default_factory=list)
    _grids: dict[tuple[int, int], Grid] = field(default_factory=dict)
    _own: OwnSlots | None = None  # of the current step
    _is_masked: bool = False  # rows have joined others, and so differ in their own tokens

    def join(self, prompt_lengths: Tensor, rows_per_prompt: Tensor, max_own: int) -> int:
        """Add prompts of `prompt_lengths` (G,) tokens with `rows_per_prompt` (G,) rows each.

        A row gets at most `max_own` own tokens. Returns the number of the first new group, whose
        keys and values follow by `store_prompts` or `restore`.
        """
        first = len(self.prompt_lengths)
        if self._layers and not self._is_masked:
            self._is_masked = True
            for held in self._layers:
                held.clear_own(len(self.num_own), max(self.num_own.tolist(), default=0))
        groups = torch.arange(first, first + len(prompt_lengths)).repeat_interleave(rows_per_prompt)
        self.prompt_lengths = torch.cat([self.prompt_lengths, prompt_lengths])
        self.group_of_row = torch.cat([self.group_of_row, groups])
        self.num_own = torch.cat([self.num_own, torch.zeros_like(groups)])
        self.max_own = max(self.max_own, max_own)
        for held in self._layers:
            self._reserve(held)
        self._grids.clear()
        self._own = None
        return first

    def store_prompts(
        self, layer: int, group: Tensor, position: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Store keys and values (T, K, D) of prompt tokens, given their group and position (T,)."""
        held = self._layer(layer, key, value)
        held.prompt_keys[group, :, position] = key
        held.prompt_values[group, :, position] = value

    def prompt(self, layer: int, group: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first `length` keys and values (K, length, D) of a prompt, as views."""
        held = self._layers[layer]
        return held.prompt_keys[group, :, :length], held.prompt_values[group, :, :length]

    def save(self, row: int) -> Saved:
        """Copy the keys and values of a row's prompt and own tokens."""
        group, num_own = int(self.group_of_row[row]), int(self.num_own[row])
        length = int(self.prompt_lengths[group])
        saved: Saved = []
        for held in self._layers:
            keys = [held.prompt_keys[group, :, :length], held.keys[row, :, :num_own]]
            values = [held.prompt_values[group, :, :length], held.values[row, :, :num_own]]
            saved.append((torch.cat(keys, 1), torch.cat(values, 1)))
        return saved

    def restore(self, group: int, saved: Saved) -> None:
        """Store saved keys and values as the first tokens of a prompt."""
        for layer, (keys, values) in enumerate(saved):
            held = self._layer(layer, keys.transpose(0, 1), values.transpose(0, 1))
            held.prompt_keys[group, :, : keys.shape[1]] = keys
            held.prompt_values[group, :, : keys.shape[1]] = values

    def _layer(self, layer: int, key: Tensor, value: Tensor) -> _Layer:
        """Return a layer; allocate it for `key` and `value` (T, K, D) if it is the next one."""
        if layer == len(self._layers):
            none = [x.new_empty(0, x.shape[1], 0, x.shape[2]) for x in (key, value)]
            width, rows = min(_FIRST_CAPACITY, self.max_own), len(self.group_of_row)
            own = [x.new_empty(rows, x.shape[1], width, x.shape[2]) for x in (key, value)]
            self._layers.append(_Layer(*none, *own))
            self._reserve(self._layers[layer])
        return self._layers[layer]

    def _reserve(self, held: _Layer) -> None:
        """Grow a layer to hold all prompts and rows, and one more own token per row."""
        prompts = (len(self.prompt_lengths), int(self.prompt_lengths.max()))
        held.prompt_keys = _with_capacity(held.prompt_keys, *prompts)
        held.prompt_values = _with_capacity(held.prompt_values, *prompts)
        own = held.keys.shape[2]
        if int(self.num_own.max()) >= own:
            own = min(max(_FIRST_CAPACITY, 2 * own), self.max_own)
        held.keys = _with_capacity(held.keys, len(self.group_of_row), own)
        held.values = _with_capacity(held.values, len(self.group_of_row), own)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend one new token per row: (R, H, D), (R, K, D), (R, K, D) -> (R, H, D).

        Scores over prompt and own tokens share one softmax, so this is plain attention over both.
        """
        (num_rows, num_heads, size), num_kv = query.shape, key.shape[1]
        rep = num_heads // num_kv
        held = self._layers[layer]
        grid = self._grids.get((num_kv, rep))
        if grid is None:
            grid = self._grids[num_kv, rep] = Grid.build(
                self.group_of_row, self.prompt_lengths, (num_kv, rep), query
            )
        if self._own is None:
            self._own = OwnSlots.build(self.num_own, key, held.keys.shape[2])
        own = self._own
        num_groups, num_prompt = len(self.prompt_lengths), grid.bias.shape[2]
        own.write(held.keys, key)
        own.write(held.values, value)
        own_keys = held.keys[:num_rows, :, : own.width].flatten(0, 1)  # (R·K, t, D), a view
        own_values = held.values[:num_rows, :, : own.width].flatten(0, 1)
        prompt_keys = held.prompt_keys[:num_groups, :, :num_prompt].flatten(0, 1)  # (G·K, P, D)
        prompt_values = held.prompt_values[:num_groups, :, :num_prompt].flatten(0, 1)

        query = (query * scale).reshape(num_rows * num_heads, size)
        in_grid = query.index_select(0, grid.to_grid).view(num_groups * num_kv, -1, size)
        prompt_scores = torch.baddbmm(grid.bias, in_grid, prompt_keys.transpose(1, 2))
        prompt_scores = prompt_scores.view(-1, num_prompt).index_select(0, grid.to_rows)
        per_kv = query.view(num_rows * num_kv, rep, size)
        own_scores = (
            torch.bmm(per_kv, own_keys.transpose(1, 2))
            if own.bias is None
            else torch.baddbmm(own.bias, per_kv, own_keys.transpose(1, 2))
        )
        scores = torch.cat([prompt_scores, own_scores.view(num_rows * num_heads, -1)], 1)
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
        self.num_own = self.num_own + 1
        self._own = None
        if self._layers and int(self.num_own.max()) == self._layers[0].keys.shape[2]:
            for held in self._layers:
                self._reserve(held)

    def compact(self, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the rows where `active` (R,) bool is True.

        Returns their old indices (R',), and the moves `free` <- `moved` (M,) that were made.
        """
        rows, free, moved = compaction(active)
        longest = int(self.num_own.max()) if len(active) else 0
        for held in self._layers:
            held.keys[free, :, :longest] = held.keys[moved, :, :longest]
            held.values[free, :, :longest] = held.values[moved, :, :longest]
        self.group_of_row, self.num_own = self.group_of_row[rows], self.num_own[rows]
        sizes = torch.bincount(self.group_of_row, minlength=len(self.prompt_lengths))
        self._compact_groups(sizes > 0)
        self._grids.clear()
        self._own = None
        return rows, free, moved

    def _compact_groups(self, active: Tensor) -> None:
        """Keep the groups where `active` (G,) bool is True."""
        if active.all():
            return
        groups, free, moved = compaction(active)
        for held in self._layers:
            held.prompt_keys[free] = held.prompt_keys[moved]
            held.prompt_values[free] = held.prompt_values[moved]
        self.prompt_lengths = self.prompt_lengths[groups]
        new_index = torch.empty(len(active), dtype=torch.int64)
        new_index[groups] = torch.arange(len(groups))
        self.group_of_row = new_index[self.group_of_row]


def _with_capacity(held: Tensor, slots: int, width: int) -> Tensor:
    """Return (S, K, L, D) with at least `slots` and `width` in axes 0 and 2, new slots zero.

    A tensor that grows gets a quarter more slots than needed, because rows join a few at a time.
    """
    if held.shape[0] >= slots and held.shape[2] >= width:
        return held
    if held.numel() and held.shape[0] < slots:
        slots += slots // 4
    shape = (max(slots, held.shape[0]), held.shape[1], max(width, held.shape[2]), held.shape[3])
    larger = held.new_zeros(shape)
    larger[: held.shape[0], :, : held.shape[2]] = held
    return larger


def compaction(active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
