"""Devices that a run computes on, or that a plan may be for: GPUs by name with their memory."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import torch

from rlctl.errors import ResourceError, UsageError
from rlctl.recipes import schema
from rlctl.recipes.roles import pool_names, rollout_pool
from rlctl.runtime.planning.machine import check_torch
from rlctl.runtime.rank_info import RankInfo, default_threads
from rlctl.runtime.sandbox.settings import usable_memory
from rlctl.suggest import closest

if TYPE_CHECKING:
    from rlctl.runtime.cluster.gpus import ClusterGpus

MIB = 2**20
# Memory in MiB as nvidia-smi reports it. The plain name is the common model of several.
GPUS = {
    "T4": 15360,
    "V100": 32768,
    "V100-16GB": 16384,
    "A10": 23028,
    "A10G": 23028,
    "L4": 23034,
    "A40": 46068,
    "L40": 46068,
    "L40S": 46068,
    "RTX3090": 24576,
    "RTX4090": 24564,
    "RTX5090": 32607,
    "A6000": 49140,
    "RTX6000-Ada": 49140,
    "A100": 81920,
    "A100-40GB": 40960,
    "A800": 81920,
    "H100": 81559,
    "H100-NVL": 95830,
    "H800": 81559,
    "H20": 97871,
    "H200": 143771,
    "GH200": 97871,
    "B200": 183359,
}
_WITHOUT_BF16 = {"T4", "V100", "V100-16GB"}
_SIZE = re.compile(r"([\d.]+)\s*(GiB|GB|G|MiB|MB|M|TB|TiB)?", re.IGNORECASE)
_UNITS = {"gib": 2**30, "gb": 10**9, "g": 2**30, "mib": MIB, "mb": 10**6, "m": MIB}
_UNITS |= {"tb": 10**12, "tib": 2**40}


@dataclass(frozen=True)
class Device:
    """Kind of device and its memory in bytes."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory: int

    @property
    def has_bf16(self) -> bool | None:
        """True if it computes in bfloat16; None for another device than those of the table."""
        return self.name not in _WITHOUT_BF16 if self.name in GPUS else None


def find_device(name: str, memory: str | None = None) -> Device:
    """Return the device `name`: a GPU of the table, `cpu`, or `auto` for that of this machine.

    `memory`, such as `80GB`, replaces its memory. Raises UsageError.
    """
    plain = name.lower().replace(" ", "").replace("_", "-")
    plain = plain.removeprefix("nvidia-").removeprefix("nvidia")
    known = {name.lower(): name for name in GPUS}
    size = None if memory is None else parse_size(memory)
    if plain == "auto":
        if torch.cuda.is_available():
            found = torch.cuda.get_device_properties(0)
            return Device(found.name, "cuda", size or found.total_memory)
        if size is not None:
            return Device(f"a GPU of {memory}", "cuda", size)
        plain = "cpu"
    if plain == "cpu":
        return Device("cpu", "cpu", size or usable_memory())
    if plain not in known:
        near = closest(plain, known)
        raise UsageError(
            f"unknown device {name!r}",
            hint=f"{', '.join(GPUS)}, cpu, auto; or --memory 80GB for any other GPU",
            fix=(name, known[near]) if near else None,
        )
    return Device(known[plain], "cuda", size or GPUS[known[plain]] * MIB)


def parse_size(text: str) -> int:
    """Return the bytes of a text such as `80GB`, `24GiB` or `40000MB`. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    try:
        size = int(float(match[1]) * _UNITS[(match[2] or "GB").lower()]) if match else 0
    except ValueError:
        size = 0
    if size < 100 * MIB:
        raise UsageError(f"{text!r} is not a memory size", where="--memory", hint="--memory 80GB")
    return size


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
            kind = "cuda" if gpus is not None or torch.cuda.is_available() else "cpu"
            if kind == "cpu":
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
    nodes = () if gpus is None else gpus.nodes
    if gpus is None and not torch.cuda.is_available():
        from rlctl.runtime.cluster.gpus import own_gpus

        nodes = (own_gpus("this machine"),)
    for node in nodes:
        check = check_torch(node.torch, node.cuda, node.gpus)
        if check.state != "ok":
            message = f"torch cannot use the GPUs of {node.address}: {check.message}"
            raise ResourceError(message, hint=check.remedy)


def _memory(gpus: ClusterGpus | None) -> int | None:
    """Return the bytes of a GPU of the cluster, or of this machine; None if they are unknown."""
    if gpus is None:
        known = torch.cuda.is_available()
        return torch.cuda.get_device_properties(0).total_memory if known else None
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
    is_client = config.actor_rollout_ref.rollout.is_client and pool == rollout_pool(config, needs)
    return "cpu" if is_client else devices.kind


def inline_rank_info(trainer: schema.Trainer) -> RankInfo:
    """Return the rank of roles that work in this process, without a run."""
    kind = Devices.from_config(trainer).kind
    threads = trainer.num_threads or default_threads(1)
    return RankInfo(0, 1, kind, threads, trainer.timeouts.call_s, False, None)
