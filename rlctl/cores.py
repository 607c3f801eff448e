"""Cores of this machine, and resources of processes."""

from __future__ import annotations

import os
from pathlib import Path

OPENMP_WAIT = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # the first overrides the second
SPIN_COUNT = "3000"  # docs/decisions.md has the reason


def allowed_cores() -> int:
    """Return the number of cores that this process may use, which only Linux restricts."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def process_resources(device: str, fraction: float) -> dict[str, float]:
    """Return the Ray resources of one process: `fraction` of a GPU plus a CPU, or of a CPU."""
    return {"CPU": 1.0, "GPU": fraction} if device == "cuda" else {"CPU": fraction}
