"""Choice of what an engine receives of a policy at each weight sync."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.runtime.model.load import compute_dtype
from rlctl.runtime.rollout.engine_weights import AdapterSync

MERGES = {"lora_merge": "this engine always gets merged weights"}  # unused key of `rollout`


@runtime_checkable
class PartialSync(Protocol):
    """Engine class whose `load_weights` takes a part of the weights and keeps the others."""

    @staticmethod
    def adapter_sync(
        rollout: schema.Rollout, model: schema.Model, dtype: torch.dtype, device: str
    ) -> AdapterSync:
        """Return the form in which the engine takes `model`, computing in `dtype` on `device`."""
        ...


def merged_sync(
    rollout: schema.Rollout, model: schema.Model, dtype: torch.dtype, device: str
) -> AdapterSync:
    """Return MERGED, for engines that do not compute adapters."""
    del rollout, model, dtype, device
    return AdapterSync.MERGED


def adapter_sync(rollout: schema.Rollout, model: schema.Model, device: str) -> AdapterSync:
    """Return the form in which the configured engine takes `model`.

    An engine that is no `PartialSync` takes all weights each time.
    """
    engine = load("engines", rollout.name)
    if not isinstance(engine, PartialSync):
        return AdapterSync.WHOLE
    if model.lora_rank == 0:
        return AdapterSync.MERGED
    return engine.adapter_sync(rollout, model, compute_dtype(model, device), device)
