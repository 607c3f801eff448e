"""Base classes of workers that hold a model."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.files import apply_umask
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Rollouts
from rlctl.runtime.base.budget import Budget, OomRetry
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.base.roles import LearningRole, ModelRole
from rlctl.runtime.model.adapter_names import adapter_parameters, merged_parameters
from rlctl.runtime.model.causal_lm import PackedModel, PolicyModel
from rlctl.runtime.model.load import compute_dtype, master_dtype
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.probe import check_model
from rlctl.runtime.model.sharding import shard
from rlctl.runtime.model.stage import saved_buffers
from rlctl.runtime.model.tower import image_processor
from rlctl.runtime.workers.background import PARTS
from rlctl.runtime.workers.dispatch import Dispatch, Worker, dispatch
from rlctl.runtime.workers.learner import Learner
from rlctl.runtime.workers.rng import rng_state

M = TypeVar("M", bound=PackedModel)


def prepare(
    model: M,
    settings: schema.Model,
    fsdp: schema.FSDP,
    rank_info: RankInfo,
    compiled: bool | None = False,
) -> M:
    """Check `model`, compile and shard it on the rank's device, in place; return it."""
    device = rank_info.device
    storage = RankStorage(device, master_dtype(fsdp), compute_dtype(settings, device))
    model.eval()
    if settings.is_4bit:
        from rlctl.runtime.model.four_bit import check_unsharded

        check_unsharded(rank_info.world_size, storage.trained, storage.compute)
        model = model.to(device)
        check_model(model, None)
    else:
        check_model(model, storage)
    if compiled or (compiled is None and device != "cpu"):
        from rlctl.runtime.model.compiled import compile_configured

        compile_configured(model.hf, compiled, settings, fsdp, device)
    shard(model, rank_info, fsdp, storage)
    return model


class ShardedSpec(Protocol):
    """Settings of a worker that holds a model."""

    @property
    def fsdp(self) -> schema.FSDP:
        """Sharding of the model."""
        ...


class ModelWorker(Worker, ModelRole):
    """Base of workers that hold a model. Their first argument is their settings."""

    learner: Learner

    @classmethod
    def ranks_per_row(cls, *args: Any, **kwargs: Any) -> int:
        del kwargs
        spec: ShardedSpec = args[0]
        return spec.fsdp.ranks_per_row

    @dispatch(Dispatch.RANK_ZERO, reads=True)
    def pop_oom_retries(self) -> list[OomRetry]:
        """See `ModelRole`. Rank 0 reports its retries; only a single rank reduces micro-batches."""
        retries = self.learner.oom_retries
        self.learner.oom_retries = []
        return retries


class LearningWorker(ModelWorker, LearningRole):
    """Base of workers whose model is trained."""

    budget: Budget

    @dispatch(Dispatch.BROADCAST, reads=True)
    def check_folder(self, folder: Path) -> None:
        """See `LearningRole`."""
        if not folder.is_dir():
            raise ConfigError(
                f"the machine {socket.gethostname()} would write checkpoints to {folder}, and does "
                "not have this folder",
                where="trainer.run_dir",
                hint="give a folder that all machines of the run share (docs/cluster.md)",
            )

    def close(self) -> None:
        """End the thread that writes checkpoints."""
        if self.learner.optimizer is not None:
            self.learner.writer.close()

    @dispatch(Dispatch.BROADCAST, reads=True)
    def mark_step(self) -> None:
        """See `LearningRole`."""
        self.learner.random_state = rng_state()

    @dispatch(Dispatch.BROADCAST, reads=True)
    def save(
        self, folder: Path, export: Path | None = None, contents: Sequence[str] = PARTS
    ) -> None:
        """See `LearningRole`. Collective; `await_written` waits for the files.

        Rank 0 writes the export. Adapters are merged into its weights, and also written to the
        folder `adapter` next to it.
        """
        if export is not None:
            self.learner.parameters.enter()
            self._export(export)
        self.learner.save(folder, contents)

    @dispatch(Dispatch.BROADCAST)
    def load(self, folder: Path, with_optimizer: bool = True) -> None:
        """See `LearningRole`. Collective."""
        self.learner.load(folder, with_optimizer)

    @dispatch(collect_fn=lambda _, results: list(chain(*results)), reads=True)
    def pop_broken_updates(self, batch: Rollouts | None = None) -> list[Any]:
        """Return what broke updates since the last call, and a pass over `batch`. Collective."""
        from rlctl.runtime.workers.broken_update import examine_pass, pop

        if batch is not None:
            examine_pass(self.learner, batch, self.budget)
        return pop(self.learner)

    @dispatch(Dispatch.RANK_ZERO, reads=True)
    def state_bytes(self) -> int:
        """Return the bytes of the weights, the optimizer's two moments and any average.

        Each is float32, also for weights in bfloat16, whose rest the optimizer has. Those of all
        ranks together.
        """
        trained = (
            parameter for parameter in self.learner.model.parameters() if parameter.requires_grad
        )
        copies = 3 if self.learner.average is None else 4
        return 4 * copies * sum(parameter.numel() for parameter in trained)

    def _export(self, folder: Path) -> None:
        hf = self.learner.model.hf
        rank = self.learner.rank_info.rank
        dtype = next(parameter.dtype for parameter in hf.parameters() if parameter.requires_grad)
        weights = _cpu_copy(merged_parameters(hf), rank, dtype)
        if weights:  # buffers keep their dtype
            weights |= {name: value.cpu() for name, value in saved_buffers(hf).items()}
        is_policy = isinstance(self.learner.model, PolicyModel)
        adapter = _cpu_copy(adapter_parameters(hf), rank, dtype) if is_policy else {}

        def write() -> None:
            hf.save_pretrained(folder, state_dict=weights)
            apply_umask(*folder.glob("*.safetensors"))
            if image_processor(hf) is not None:
                from rlctl.runtime.model.vision import copy_processor

                copy_processor(hf, folder)
            if adapter:
                from rlctl.runtime.model.lora import write_adapter

                write_adapter(folder.with_name("adapter"), hf, adapter)

        if weights:
            self.learner.writer.submit(folder, write)


def _cpu_copy(
    parameters: Iterable[tuple[str, Tensor]], rank: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return copies in CPU memory in `dtype` on rank 0, and nothing on other ranks. Collective."""
    pairs = (
        (name, value.to("cpu", dtype, copy=True) if rank == 0 else None)
        for name, value in parameters
    )
    return {name: value for name, value in pairs if value is not None}
