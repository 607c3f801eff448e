"""Devices that a run computes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from rlctl.cores import default_threads
from rlctl.errors import ResourceError
from rlctl.recipes import schema
from rlctl.recipes.role_table import pool_names, rollout_pool
from rlctl.runtime.base.rank_info import RankInfo

if TYPE_CHECKING:
    from rlctl.runtime.cluster.gpus import ClusterGpus

LOG = logging.getLogger(__name__)

GPUS_OF_KERNEL = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Devices:
    """Devices of a run: `per_node` processes on each of `num_nodes` nodes, with one device each."""

    kind: str  # "cpu" or "cuda"
    num_nodes: int
    per_node: int
    memory: int | None = None  # bytes of a GPU; None if they are unknown, and on a CPU
    has_bf16: bool | None = None  # of GPUs elsewhere: see `compute_dtype`

    @property
    def total(self) -> int:
        """Number of devices on all nodes."""
        return self.num_nodes * self.per_node

    @classmethod
    def from_config(cls, trainer: schema.Trainer, gpus: ClusterGpus | None = None) -> Self:
        """Resolve `trainer.device=auto` and `trainer.n_gpus_per_node=0`.

        `auto` is the GPU where there is one; 0 is every GPU, or one process on a CPU. `gpus` are
        those of a cluster if this machine has none. Raises ResourceError if there are fewer GPUs
        than asked for, and if torch cannot use those of a node.
        """
        kind = trainer.device
        if kind == "auto":
            kind = "cuda"
            if gpus is None and not torch.cuda.is_available():
                kind = "cpu"
                _warn_of_unused_gpus()
        if kind == "cuda":
            _check_builds(gpus)
        where = "this machine has" if gpus is None else "each node of the cluster has"
        found = 1
        if kind == "cuda":
            found = torch.cuda.device_count() if gpus is None else gpus.per_node
        per_node = trainer.n_gpus_per_node or found
        if kind == "cuda" and (per_node == 0 or (trainer.nnodes == 1 and per_node > found)):
            works = f"trainer.n_gpus_per_node={found}" if found else "trainer.device=cpu"
            raise ResourceError(
                f"trainer.device={trainer.device} and "
                f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, "
                f"but {where} {found} GPUs",
                hint=works,
                fix=(works.partition("=")[0], works),
            )
        memory = _memory(gpus) if kind == "cuda" else None
        return cls(kind, trainer.nnodes, per_node, memory, gpus and gpus.has_bf16)


def _check_builds(gpus: ClusterGpus | None) -> None:
    """Raise ResourceError for GPUs that torch cannot use, such as those with an old driver."""
    if gpus is None and torch.cuda.is_available():
        return
    from rlctl.runtime.planning.machine import check_torch

    if gpus is None:
        from rlctl.runtime.cluster.gpus import own_gpus

        nodes = (own_gpus("this machine"),)
    else:
        nodes = gpus.nodes
    for node in nodes:
        check = check_torch(node.torch, node.cuda, node.gpus)
        if check.state != "ok":
            message = f"torch cannot use the GPUs of {node.address}: {check.message}"
            raise ResourceError(message, hint=check.remedy)


def _memory(gpus: ClusterGpus | None) -> int | None:
    """Return the bytes of a GPU of the cluster, or of this machine; None if they are unknown."""
    if gpus is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    if gpus is None:
        return None
    from rlctl.runtime.planning.known_gpus import GPUS, MIB

    return gpus.memory or (GPUS[gpus.name] * MIB if gpus.name in GPUS else None)


@cache
def _warn_of_unused_gpus() -> None:
    """Warn once if the kernel has NVIDIA GPUs that torch cannot use, unless they are hidden."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(GPUS_OF_KERNEL.glob("*")):
        LOG.warning(
            "this machine has a GPU that torch cannot use, so trainer.device=auto is the CPU; "
            "`rlctl doctor` shows versions of torch and driver, trainer.device=cpu accepts it"
        )


def pool_sizes(config: schema.Config, devices: Devices, needs: Flag) -> Mapping[str, int]:
    """Return the number of processes of each pool on all nodes, that of the trained role first."""
    placement = config.trainer.placement
    return {
        name: placement.pools.get(name, devices.per_node) * devices.num_nodes
        for name in pool_names(config, needs)
    }


def pool_device(config: schema.Config, devices: Devices, needs: Flag, pool: str) -> str:
    """Return the device of the processes of `pool`, "cpu" or "cuda"."""
    if config.actor_rollout_ref.rollout.is_client and pool == rollout_pool(config, needs):
        return "cpu"
    return devices.kind


def inline_rank_info(trainer: schema.Trainer) -> RankInfo:
    """Return the rank of roles that work in this process, without a run."""
    kind = Devices.from_config(trainer).kind
    threads = trainer.num_threads or default_threads(1)
    return RankInfo(0, 1, kind, threads, trainer.timeouts.call_s, False, None)
