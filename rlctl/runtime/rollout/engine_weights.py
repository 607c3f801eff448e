"""Parameters of a policy that a rollout engine receives, and which of them change in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor, nn

from rlctl.runtime.model.adapter_names import (
    FIRST_MATRIX,
    engine_name,
    engine_parameters,
    has_adapters,
    is_adapter,
    merged_parameters,
)
from rlctl.runtime.model.sharding import local_rows
from rlctl.runtime.model.stage import parameter_names
from rlctl.runtime.model.tower import frozen_in_towers


class AdapterSync(Enum):
    """Form in which an engine receives a policy, which may have LoRA adapters."""

    WHOLE = auto()  # all weights at each weight sync, adapters merged
    MERGED = auto()  # frozen weights once, then only the others, which adapters are merged into
    ADAPTERS = auto()  # the base once, then only the adapters


class Selection(Enum):
    """Parameters that a weight sync sends."""

    ALL = auto()  # the frozen ones before the changing ones
    FROZEN = auto()
    CHANGING = auto()


@dataclass(frozen=True, eq=False)
class EngineWeights:
    """Parameters of a policy in the form that an engine receives.

    Without adapters, all of them change but those of a frozen vision tower. Shards are converted to
    `dtype`, that of the engine, before they are gathered.
    """

    module: nn.Module
    sync: AdapterSync
    dtype: torch.dtype | None = None

    @property
    def merges(self) -> bool:
        """True if adapters are merged, which gathers whole parameters."""
        return has_adapters(self.module) and self.sync is not AdapterSync.ADAPTERS

    def parameters(self, selection: Selection) -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters (N, ...) by name, adapters by peft's names. Collective."""
        if selection is Selection.ALL:
            yield from self.parameters(Selection.FROZEN)
            yield from self.parameters(Selection.CHANGING)
            return
        selected = self._selected(selection)
        if self.merges:
            yield from merged_parameters(self.module, selected)
            return
        yield from engine_parameters(self.module, selected, self.dtype)

    def rows(self, selection: Selection, part: int) -> Iterator[tuple[str, Tensor, int]]:
        """Yield rows (M, ...) as `local_rows` does, unless adapters are merged."""
        if selection is Selection.ALL:
            yield from self.rows(Selection.FROZEN, part)
            yield from self.rows(Selection.CHANGING, part)
            return
        selected = self._selected(selection)
        for name, rows, num_elements in local_rows(self.module, part):
            if selected(name):
                yield engine_name(name), rows, num_elements

    def _selected(self, selection: Selection) -> Callable[[str], bool]:
        """Return the test of a parameter's name for `selection`: FROZEN or CHANGING."""
        changes = self._changes()
        return lambda name: changes(name) is (selection is Selection.CHANGING)

    def _changes(self) -> Callable[[str], bool]:
        """Return the test of names for parameters that change in the engine."""
        layers = {
            name.partition(FIRST_MATRIX)[0]
            for name in parameter_names(self.module)
            if FIRST_MATRIX in name
        }
        if self.sync is AdapterSync.WHOLE:
            return lambda _: True
        if not layers:
            frozen = frozen_in_towers(self.module)
            return lambda name: name not in frozen
        if self.sync is AdapterSync.ADAPTERS:
            return is_adapter
        # Engines stack layers of a block (query, key and value) and load a stack as a unit.
        blocks = {name.rpartition(".")[0] for name in layers}
        return lambda name: name.rpartition(".")[0].rpartition(".")[0] in blocks
