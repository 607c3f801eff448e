"""States of the mixers of a model for the running rows of the engine `hf`.

Axes: G prompts (groups), R rows (responses).
"""

from __future__ import annotations

from torch import Tensor
from transformers import DynamicCache

from rlctl.runtime.model.mixers import Mixer


class RowStates:
    """States of all rows, in transformers' cache, which the mixers update in place."""

    def __init__(self) -> None:
        self._cache: DynamicCache | None = None

    def __bool__(self) -> bool:
        """Return True if the model has mixers."""
        return self._cache is not None

    def store(
        self, mixer: Mixer, states: DynamicCache, groups: Tensor, group_of_row: Tensor
    ) -> None:
        """Give the rows of `groups` (G,) a mixer's states of their prompts.

        `group_of_row` (R,) are those of all rows.
        """
        if self._cache is None:
            self._cache = mixer.new_states()
        of_rows, of_prompts = self._cache.layers[mixer.layer], states.layers[mixer.layer]
        rows, prompts = (group_of_row[:, None] == groups).nonzero(as_tuple=True)
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
        """Mix one token of each row: (R, C) -> (R, C)."""
        return mixer(hidden[:, None], self._cache)[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Keep the states (R, ...) of `rows` (R',), in this order."""
        for layer in self._cache.layers if self._cache is not None else ():
            for name in ("conv_states", "recurrent_states"):
                held: dict[int, Tensor | None] = getattr(layer, name, {})
                for number, value in held.items():
                    if value is not None:
                        held[number] = value[rows.to(value.device)]


def _with_rows(held: Tensor | None, like: Tensor, rows: int) -> Tensor:
    """Return states (R, ...) that begin with `held` and have at least `rows`; new ones are 0."""
    count = 0 if held is None else len(held)
    if held is not None and count >= rows:
        return held
    larger = like.new_zeros(rows, *like.shape[1:])
    if held is not None:
        larger[:count] = held
    return larger
