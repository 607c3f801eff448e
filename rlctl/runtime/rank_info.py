"""Rank, device and resources of one process of a pool."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlctl.cores import allowed_cores
from rlctl.runs.run_dir import Access


@dataclass(frozen=True)
class RankInfo:
    """Identity and limits of one of `world_size` processes with one device each."""

    rank: int
    world_size: int
    device: str  # "cpu" or "cuda"
    num_threads: int
    timeout_s: float  # of collectives and calls
    deterministic: bool
    log_path: Path | None  # stdout and stderr are redirected there; None: not redirected
    seed: int = 0  # global seed of the process is seed + rank
    access: Access = "owner"  # users who can read the files of a process with a separate log
    host: str = ""  # address at which the other processes reach this one, once they are connected


def process_resources(device: str, fraction: float) -> dict[str, float]:
    """Return the Ray resources of one process: `fraction` of a GPU plus a CPU, or of a CPU."""
    return {"CPU": 1.0, "GPU": fraction} if device == "cuda" else {"CPU": fraction}


def default_threads(num_processes: int) -> int:
    """Return the threads of each of `num_processes`: OMP_NUM_THREADS, or a share of the cores.

    Ray itself sets the variable in its jobs, where it is no wish of the user.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0 and "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return int(given)
    return max(1, available_cores() // num_processes)


def available_cores() -> int:
    """Return the number of usable cores: the CPU affinity, limited by the cgroup v2 quota."""
    cores = allowed_cores()
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text(encoding="utf-8").split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores
