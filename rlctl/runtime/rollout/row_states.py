"""States of the mixers of a model for the running rows of the engine `hf`.

Axes: G prompts (groups), R rows (responses).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

if TYPE_CHECKING:
    from rlctl.runtime.model.mixers import Mixer


class RowStates:
    """States of all rows, in transformers' cache, which the mixers update in place.

    Layers step all rows together. A complete decoder steps those that have been equally long from
    their start on, so that its attention needs no mask.
    """

    def __init__(self) -> None:
        self._cache: DynamicCache | None = None
        self._equally_long: list[tuple[Tensor, DynamicCache]] = []  # rows (N,) and their states

    def __bool__(self) -> bool:
        """Return True if the model has mixers."""
        return self._cache is not None or bool(self._equally_long)

    def store(
        self, mixer: Mixer, states: DynamicCache, groups: Tensor, group_of_row: Tensor
    ) -> None:
        """Give the rows of `groups` (G,) a mixer's states of their prompts.

        `group_of_row` (R,) are those of all rows.
        """
        from rlctl.runtime.model.mixers import LayerMixer

        rows, prompts = (group_of_row[:, None] == groups).nonzero(as_tuple=True)
        if not isinstance(mixer, LayerMixer):
            states.reorder_cache(prompts)  # pyright: ignore[reportArgumentType]
            self._equally_long.append((rows, states))
            return
        if self._cache is None:
            self._cache = mixer.new_states()
        of_rows = self._cache.layers[mixer.layer]
        of_prompts = states.layers[mixer.layer]
        for name in ("conv_states", "recurrent_states"):
            held: dict[int, Tensor | None] = getattr(of_rows, name)
            for number, value in getattr(of_prompts, name).items():
                if value is not None:
                    all_rows = held[number] = _with_rows(held[number], value, len(group_of_row))
                    all_rows[rows] = value[prompts]
        for name, value in vars(of_prompts).items():  # sizes, and which states exist
            if name not in ("conv_states", "recurrent_states"):
                setattr(of_rows, name, value)

    def step(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """Mix one token of each row: (R, ...) -> (R, C)."""
        if self._cache is not None:
            return mixer(hidden[:, None], self._cache)[:, 0]
        parts = [mixer(hidden[rows, None], states)[:, 0] for rows, states in self._equally_long]
        order = torch.cat([rows for rows, _ in self._equally_long]).argsort()
        return torch.cat(parts)[order]

    def keep(self, rows: Tensor) -> None:
        """Keep the states (R, ...) of `rows` (R',), in this order."""
        if self._cache is not None:
            for layer in self._cache.layers:
                layer.reorder_cache(rows)  # pyright: ignore[reportArgumentType]
        before = self._equally_long
        self._equally_long = []
        for stepped, states in before:
            left, places = (rows[:, None] == stepped).nonzero(as_tuple=True)
            if len(left):
                states.reorder_cache(places)  # pyright: ignore[reportArgumentType]
                self._equally_long.append((left, states))


def _with_rows(held: Tensor | None, like: Tensor, rows: int) -> Tensor:
    """Return states (R, ...) that begin with `held` and have at least `rows`; new ones are 0."""
    count = 0 if held is None else len(held)
    if held is not None and count >= rows:
        return held
    larger = like.new_zeros(rows, *like.shape[1:])
    if held is not None:
        larger[:count] = held
    return larger
