"""Where a process stands in its pool and what it may use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankInfo:
    """One of `world_size` processes, each with one device."""

    rank: int
    world_size: int
    device: str  # "cpu" or "cuda"
    num_threads: int
    timeout_s: float  # deadline of a collective
    deterministic: bool
    log_path: Path | None  # what the process prints goes there; None: where it went before
    seed: int = 0  # of what has no random stream of its own, with the rank added


def process_resources(device: str, fraction: float) -> dict[str, float]:
    """What one process takes of a cluster: `fraction` of a GPU and a CPU slot, or of a CPU slot where there is no GPU."""
    return {"CPU": 1.0, "GPU": fraction} if device == "cuda" else {"CPU": fraction}


def available_cores() -> int:
    """The cores this process may use: its CPU affinity, or less where the container's quota (cgroup v2) allows less."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores
