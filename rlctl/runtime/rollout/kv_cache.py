"""KV cache of the running responses of the engine `hf`.

The keys and values of a prompt are stored once for all its responses. A row holds one response:
the keys and values of its tokens follow those of its prompt. Rows may join at any step. While all
responses have the same number of tokens, as in a batch that started together, that part of the
cache is a dense rectangle and needs no mask. Finished rows free their slots, and compaction moves
the last rows into them, so little is copied and the rows stay contiguous.

Axes: G prompts (groups), R rows (responses), H query heads, K key-value heads, D head size,
P tokens of the longest prompt, t response tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.runtime.base.ops import to_device
from rlctl.runtime.rollout.kv_slots import Grid, OwnSlots, StepShape, bucket, outside_window

if TYPE_CHECKING:
    from rlctl.runtime.rollout.row_states import RowStates

# Initial capacity of response tokens per row. It doubles, so memory follows the long responses.
_FIRST_CAPACITY = 64
_numbers = count(1)
# Keys and values by layer, each (K, L, D): the cache of one row with its prompt.
Saved = dict[int, tuple[Tensor, Tensor]]


@dataclass(eq=False)
class _Layer:
    """Cache of one layer. Slots after the active rows and groups hold stale data."""

    prompt_keys: Tensor  # (G, K, P, D)
    prompt_values: Tensor  # (G, K, P, D)
    keys: Tensor  # (R, K, capacity, D)
    values: Tensor  # (R, K, capacity, D)

    def clear_own(self, rows: int, width: int) -> None:
        """Set the slots of responses to 0 except the first `width` of the first `rows`."""
        for held in (self.keys, self.values):
            held[rows:] = 0
            held[:, :, width:] = 0


def num_saved(saved: Saved) -> int:
    """Return the number of tokens that a saved cache holds."""
    return next(iter(saved.values()))[0].shape[1]


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class KVCache:
    """Keys and values of prompts and rows.

    Implements `Slots` for the next step of its active rows. Unused slots hold finite values where
    they are masked: 0 · NaN would be NaN.
    """

    prompt_lengths: Tensor = field(default_factory=_none)  # (G,) int64, CPU: of active groups
    group_of_row: Tensor = field(default_factory=_none)  # (R,) int64, CPU: of active rows
    num_own: Tensor = field(default_factory=_none)  # (R,) int64, CPU: response tokens of each row
    max_own: int = 0  # limit of response tokens of any row
    padded: bool = False  # there are slots for steps of `step_shape`, all of them finite
    storage: int = 0  # another number for each allocation
    layout: int = 0  # another number whenever rows join or leave
    layers: dict[int, _Layer] = field(default_factory=dict)  # by the number of the model's layer
    _states: RowStates | None = None  # of other layers than attention
    _widest: int = 1  # rows of the largest group so far, as a bucket
    _grids: dict[tuple[int, int], Grid] = field(default_factory=dict)
    _own: dict[int, OwnSlots] = field(default_factory=dict)  # of the current step, by KV heads
    _outside: dict[int, Tensor] = field(default_factory=dict)  # likewise, by window
    _is_masked: bool = False  # rows have joined others, and so differ in `num_own`

    @property
    def states(self) -> RowStates:
        """States of other layers than attention."""
        if self._states is None:
            from rlctl.runtime.rollout.row_states import RowStates

            self._states = RowStates()
        return self._states

    @property
    def has_states(self) -> bool:
        """True if the model has other layers than attention."""
        return bool(self._states)

    def join(self, prompt_lengths: Tensor, rows_per_prompt: Tensor, max_own: int) -> int:
        """Add prompts of `prompt_lengths` (G,) tokens with `rows_per_prompt` (G,) rows each.

        A row gets at most `max_own` response tokens. Returns the number of the first new group,
        whose keys and values follow by `store_prompts` or `restore`.
        """
        first = len(self.prompt_lengths)
        if self.layers and not self._is_masked and not self.padded:
            self._is_masked = True
            for held in self.layers.values():
                held.clear_own(len(self.num_own), max(self.num_own.tolist(), default=0))
        groups = torch.arange(first, first + len(prompt_lengths)).repeat_interleave(rows_per_prompt)
        self.prompt_lengths = torch.cat([self.prompt_lengths, prompt_lengths])
        self.group_of_row = torch.cat([self.group_of_row, groups])
        self.num_own = torch.cat([self.num_own, torch.zeros_like(groups)])
        self.max_own = max(self.max_own, max_own)
        self._widest = max(self._widest, bucket(int(rows_per_prompt.max())))
        for held in self.layers.values():
            self._reserve(held)
        self._rows_changed()
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
        held = self.layers[layer]
        return held.prompt_keys[group, :, :length], held.prompt_values[group, :, :length]

    @property
    def any_layer(self) -> _Layer:
        """A layer; all have the same capacity."""
        return next(iter(self.layers.values()))

    def save(self, row: int) -> Saved:
        """Copy the keys and values of a row's prompt and response."""
        group = int(self.group_of_row[row])
        num_own = int(self.num_own[row])
        length = int(self.prompt_lengths[group])
        saved: Saved = {}
        for layer, held in self.layers.items():
            keys = [held.prompt_keys[group, :, :length], held.keys[row, :, :num_own]]
            values = [held.prompt_values[group, :, :length], held.values[row, :, :num_own]]
            saved[layer] = (torch.cat(keys, 1), torch.cat(values, 1))
        return saved

    def restore(self, group: int, saved: Saved) -> None:
        """Store saved keys and values as the first tokens of a prompt."""
        for layer, (keys, values) in saved.items():
            held = self._layer(layer, keys.transpose(0, 1), values.transpose(0, 1))
            held.prompt_keys[group, :, : keys.shape[1]] = keys
            held.prompt_values[group, :, : keys.shape[1]] = values

    def _layer(self, layer: int, key: Tensor, value: Tensor) -> _Layer:
        """Return a layer; allocate it for `key` and `value` (T, K, D) if it is new."""
        if layer not in self.layers:
            none = [x.new_empty(0, x.shape[1], 0, x.shape[2]) for x in (key, value)]
            width = min(_FIRST_CAPACITY, self.max_own)
            rows = self._slots(len(self.group_of_row))
            responses = [x.new_empty(rows, x.shape[1], width, x.shape[2]) for x in (key, value)]
            self.layers[layer] = _Layer(*none, *responses)
            if self.padded:
                self.layers[layer].clear_own(0, 0)
            self._reserve(self.layers[layer])
        return self.layers[layer]

    def _reserve(self, held: _Layer) -> None:
        """Grow a layer to hold all prompts and rows, and one more response token per row."""
        prompts = (self._slots(len(self.prompt_lengths)), int(self.prompt_lengths.max()))
        capacity = held.keys.shape[2]
        if int(self.num_own.max()) >= capacity:
            capacity = min(max(_FIRST_CAPACITY, 2 * capacity), self.max_own)
        rows = (self._slots(len(self.group_of_row)), capacity)
        before = (held.prompt_keys, held.keys)
        held.prompt_keys = _with_capacity(held.prompt_keys, *prompts)
        held.prompt_values = _with_capacity(held.prompt_values, *prompts)
        held.keys = _with_capacity(held.keys, *rows)
        held.values = _with_capacity(held.values, *rows)
        if held.prompt_keys is not before[0] or held.keys is not before[1]:
            self.storage = next(_numbers)

    def _slots(self, count: int) -> int:
        """Return the number of slots for `count` rows or groups."""
        return bucket(count) if self.padded else count

    def grid(self, heads: tuple[int, int], like: Tensor) -> Grid:
        """See `Slots`: the grid of the active rows without padding; `like` (R, H, D)."""
        if heads not in self._grids:
            self._grids[heads] = self.build_grid(heads, like)
        return self._grids[heads]

    def own_slots(self, like: Tensor) -> OwnSlots:
        """See `Slots`; `like` (R, K, D)."""
        if like.shape[1] not in self._own:
            capacity = self.any_layer.keys.shape[2]
            self._own[like.shape[1]] = OwnSlots.build(self.num_own, like, capacity)
        return self._own[like.shape[1]]

    def outside(self, window: int, num_prompt: int, num_own: int, like: Tensor) -> Tensor:
        """See `Slots`; `like` (R·H, D)."""
        if window not in self._outside:
            contexts = self.prompt_lengths[self.group_of_row]
            hidden = outside_window(window, contexts, self.num_own, (num_prompt, num_own))
            self._outside[window] = to_device(hidden, like.device)
        return self._outside[window]

    def build_grid(
        self, heads: tuple[int, int], like: Tensor, shape: StepShape | None = None
    ) -> Grid:
        """Build a grid of the active rows: see `Grid.build`; `like` (R, H, D)."""
        return Grid.build(self.group_of_row, self.prompt_lengths, heads, like, shape)

    def step_shape(self) -> StepShape:
        """Return the sizes of a step with padding, the same for many steps."""
        held = self.any_layer
        longest = int(self.num_own.max())
        return StepShape(
            rows=bucket(len(self.num_own)),
            groups=bucket(len(self.prompt_lengths)),
            width=self._widest,
            prompt=min(bucket(int(self.prompt_lengths.max())), held.prompt_keys.shape[2]),
            response=min(max(_FIRST_CAPACITY, 1 << longest.bit_length()), held.keys.shape[2]),
        )

    def emptied(self) -> KVCache:
        """Return a cache without rows that has the memory of this one, which is not used again."""
        return KVCache(padded=self.padded, storage=self.storage, layers=self.layers)

    def advance(self) -> None:
        """Count the token that all layers attended, and grow the cache if it is full."""
        self.num_own = self.num_own + 1
        self._own.clear()
        self._outside.clear()
        if self.layers and int(self.num_own.max()) == self.any_layer.keys.shape[2]:
            for held in self.layers.values():
                self._reserve(held)

    def _rows_changed(self) -> None:
        """Drop what was computed for the rows before."""
        self._grids.clear()
        self._own.clear()
        self._outside.clear()
        self.layout = next(_numbers)

    def compact(self, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the rows where `active` (R,) bool is True.

        Returns their old indices (R',), and the moves `free` <- `moved` (M,) that were made.
        """
        rows, free, moved = compaction(active)
        longest = int(self.num_own.max()) if len(active) else 0
        for held in self.layers.values():
            held.keys[free, :, :longest] = held.keys[moved, :, :longest]
            held.values[free, :, :longest] = held.values[moved, :, :longest]
        if self._states is not None:
            self._states.keep(rows)
        self.group_of_row, self.num_own = self.group_of_row[rows], self.num_own[rows]
        sizes = torch.bincount(self.group_of_row, minlength=len(self.prompt_lengths))
        self._compact_groups(sizes > 0)
        self._rows_changed()
        return rows, free, moved

    def _compact_groups(self, active: Tensor) -> None:
        """Keep the groups where `active` (G,) bool is True."""
        if active.all():
            return
        groups, free, moved = compaction(active)
        for held in self.layers.values():
            held.prompt_keys[free] = held.prompt_keys[moved]
            held.prompt_values[free] = held.prompt_values[moved]
        self.prompt_lengths = self.prompt_lengths[groups]
        new_index = torch.empty(len(active), dtype=torch.int64)
        new_index[groups] = torch.arange(len(groups))
        self.group_of_row = new_index[self.group_of_row]


def _with_capacity(held: Tensor, slots: int, width: int) -> Tensor:
    """Return (S, K, L, D) with at least `slots` and `width` in axes 0 and 2, new slots zero.

    A tensor that gets more slots gets a quarter more than needed, because rows join a few at a
    time. One that gets wider drops slots that are not needed: few rows are long.
    """
    if held.shape[0] >= slots and held.shape[2] >= width:
        return held
    kept = min(slots, held.shape[0])
    if held.numel() and held.shape[0] < slots:
        slots += slots // 4
    larger = held.new_zeros(slots, held.shape[1], max(width, held.shape[2]), held.shape[3])
    larger[:kept, :, : held.shape[2]] = held[:kept]
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
