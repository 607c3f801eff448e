"""Checkpoints of a learner: trainable weights, optimizer state and random state.

They do not depend on the number of ranks: a checkpoint of N ranks can be loaded on M.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlctl.runtime.model.sharding import is_quantized, trained_state
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.background import BackgroundWriter
from rlctl.runtime.workers.rng import set_rng_state

_NO_DIST_WARNING = "torch.distributed is disabled"  # expected: one rank has no process group


@dataclass(frozen=True)
class StoredState:
    """State of a learner. `average` (N, ...) is that of the weights, if there is one, by name."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Mapping[str, Tensor] | None
    random_state: Mapping[str, Any]


def save_state(
    stored: StoredState, rank_info: RankInfo, folder: Path, writer: BackgroundWriter
) -> None:
    """Copy the state to memory, and write it to `folder` in the background. Collective."""
    from torch.distributed.checkpoint.state_dict_saver import save

    optimizer = stored.optimizer
    current = _state(stored.model, optimizer, stored.average, with_optimizer=bool(optimizer.state))
    stager = _stager(rank_info.device, writer)
    state = cast(dict[str, Any], stager.stage(current))  # without a thread it copies at once
    random_state = json.dumps(stored.random_state)

    def write() -> None:
        warnings.filterwarnings("ignore", message=_NO_DIST_WARNING)
        folder.mkdir(exist_ok=True)
        _rng_file(folder, rank_info).write_text(random_state, encoding="utf-8")
        save(
            state,
            storage_writer=_writer(folder),
            process_group=writer.group,
            no_dist=rank_info.world_size == 1,
        )
        if stager is not writer.stager:
            stager.close()

    writer.submit(folder, write)


def _writer(folder: Path) -> Any:
    """Return torch's writer of files in `folder`, which writes no path into them.

    Each version of Python pickles paths by another name, and a folder may be moved.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            return StorageMeta()

    return Writer(folder)


def _stager(device: str, writer: BackgroundWriter) -> Any:
    """Return a stager; on a GPU the one that has pinned memory, when its last copy is written."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    if device != "cuda":
        return DefaultStager(StagingOptions(False, False, False, False))
    writer.wait()
    if writer.stager is None or torch.__version__ < "2.13":  # there it is empty after a copy
        writer.stager = DefaultStager(StagingOptions(True, False, False, True))
    return writer.stager


def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, Tensor] | None,
    rank_info: RankInfo,
    folder: Path,
) -> bool:
    """Restore the state in `folder`, written by any number of ranks. Collective.

    Loads into the tensors (N, ...) of `average`, and returns whether the checkpoint has them. A
    rank without a saved random state keeps its own. Raises ConfigError for damaged files.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
    )

    from rlctl.runtime.workers.safe_load import load_into, read_metadata

    saved = read_metadata(folder).state_dict_metadata
    with_optimizer = any(name.startswith("optimizer.") for name in saved)
    has_average = average is not None and any(name.startswith("average.") for name in saved)
    state = _state(model, optimizer, average if has_average else None, with_optimizer)
    warnings.filterwarnings("ignore", message=_NO_DIST_WARNING)
    # Into the optimizer's own tensors: torch's setter would move them to the device of the weights.
    load_into(state, folder, no_dist=rank_info.world_size == 1)
    partial = StateDictOptions(strict=False)  # frozen weights are not saved
    set_model_state_dict(model, state["model"], options=partial)
    rng_file = _rng_file(folder, rank_info)
    if rng_file.exists():
        set_rng_state(json.loads(rng_file.read_text(encoding="utf-8")))
    return has_average


def _state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, Tensor] | None,
    with_optimizer: bool,
) -> dict[str, Any]:
    """Return the state dicts of the model, of its average, and, if requested, of the optimizer.

    Omit an optimizer that has not stepped: torch would create its state by taking a step.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state: dict[str, Any] = {"model": trained_state(model)}
    if average is not None:
        state["average"] = dict(average)
    if with_optimizer:
        found: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
        each = {name: dict(values) for name, values in found["state"].items()}
        if any(is_quantized(value) for values in each.values() for value in values.values()):
            from rlctl.runtime.workers.optimizer_mixins import without_subclasses

            each = {name: without_subclasses(values) for name, values in each.items()}
        state["optimizer"] = found | {"state": each}
    return state


def _rng_file(folder: Path, rank_info: RankInfo) -> Path:
    return folder / f"rng_{rank_info.rank}.json"
