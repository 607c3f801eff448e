"""Checkpoints of a learner: trainable weights, optimizer state and random state.

They do not depend on the number of ranks: a checkpoint of N ranks can be loaded on M.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.sharding import is_quantized, trained_state
from rlctl.runtime.workers.background import BackgroundWriter
from rlctl.runtime.workers.rng import set_rng_state

if TYPE_CHECKING:
    from rlctl.runtime.model.average import Average

OPTIMIZER = "optimizer"  # folder
_NO_DIST_WARNING = "torch.distributed is disabled"  # expected: one rank has no process group


@dataclass(frozen=True)
class StoredState:
    """State of a learner."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None  # of the weights
    random_state: Mapping[str, Any]


def save_state(
    stored: StoredState,
    contents: Sequence[str],
    rank_info: RankInfo,
    folder: Path,
    writer: BackgroundWriter,
) -> None:
    """Copy the state to memory, and write it to `folder` in the background. Collective.

    The optimizer has a subfolder, so that it can be removed. Of the `contents`, `model` and
    `optimizer` select what is written.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    current = _weights(stored) if "model" in contents else {}
    if "optimizer" in contents and stored.optimizer.state:  # else torch would take a step
        current["optimizer"] = _optimizer_state(stored)
    stager = _stager(rank_info.device, writer)
    state = cast(dict[str, Any], stager.stage(current))  # without a thread it copies at once
    optimizer = state.pop("optimizer", None)
    random_state = json.dumps(stored.random_state)

    def write() -> None:
        warnings.filterwarnings("ignore", message=_NO_DIST_WARNING)
        folder.mkdir(exist_ok=True)
        _rng_file(folder, rank_info).write_text(random_state, encoding="utf-8")
        parts = {folder: state}
        if optimizer is not None:
            parts = {folder / OPTIMIZER: {"optimizer": optimizer}, folder: state}
        for place, part in parts.items():
            save(
                part,
                storage_writer=_writer(place),
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
    stored: StoredState, with_optimizer: bool, rank_info: RankInfo, folder: Path
) -> bool:
    """Restore the state in `folder`, written by any number of ranks. Collective.

    Loads into the tensors of `stored`, and returns whether the checkpoint has an average. A rank
    without a saved random state keeps the present one. Raises ConfigError for damaged files.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
    )

    from rlctl.runtime.workers.safe_load import load_into, read_metadata

    # Earlier versions wrote the optimizer into the same files.
    parts = [part for part in (folder, folder / OPTIMIZER) if part.is_dir()]
    saved = {part: tuple(read_metadata(part).state_dict_metadata) for part in parts}
    no_dist = rank_info.world_size == 1
    warnings.filterwarnings("ignore", message=_NO_DIST_WARNING)
    for part, names in saved.items():
        if with_optimizer and any(name.startswith("optimizer.") for name in names):
            # Into its tensors: torch's setter would move them to the device of the weights.
            load_into({"optimizer": _optimizer_state(stored)}, part, no_dist=no_dist)
    if not any(name.startswith("average.") for name in saved[folder]):
        stored = replace(stored, average=None)
    state = _weights(stored)
    load_into(state, folder, no_dist=no_dist)
    partial = StateDictOptions(strict=False)  # frozen weights are not saved
    set_model_state_dict(stored.model, state["model"], options=partial)
    rng_file = _rng_file(folder, rank_info)
    if rng_file.exists():
        set_rng_state(json.loads(rng_file.read_text(encoding="utf-8")))
    return stored.average is not None


def _weights(stored: StoredState) -> dict[str, Any]:
    """Return the state dicts of the model and of its average."""
    weights: dict[str, Any] = {"model": trained_state(stored.model)}
    if stored.average is not None:
        weights["average"] = dict(stored.average.values)
    return weights


def _optimizer_state(stored: StoredState) -> dict[str, Any]:
    """Return the state dict of the optimizer; one that has not stepped gets a state by a step."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    found: dict[str, Any] = dict(get_optimizer_state_dict(stored.model, stored.optimizer))
    each = {name: dict(values) for name, values in found["state"].items()}
    if any(is_quantized(value) for values in each.values() for value in values.values()):
        from rlctl.runtime.workers.optimizer_mixins import without_subclasses

        each = {name: without_subclasses(values) for name, values in each.items()}
    return found | {"state": each}


def _rng_file(folder: Path, rank_info: RankInfo) -> Path:
    return folder / f"rng_{rank_info.rank}.json"
