"""Facts about the device that the suite runs on, and its clocks and memory counters."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.cuda import nccl

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "liger-kernel", "vllm", "peft", "ray")


def describe(device: str) -> dict[str, str]:
    """Return the device, the versions and the commit."""
    facts = {"device": device_name(device), "python": platform.python_version()}
    facts |= {name: found for name in PACKAGES if (found := _version(name)) is not None}
    if device == "cuda":
        facts["CUDA"] = str(torch.version.cuda)
        facts["NCCL"] = ".".join(str(part) for part in nccl.version())
        free, total = torch.cuda.mem_get_info()
        facts["memory"] = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return facts | {"commit": _commit(), "command": " ".join(["python", *sys.orig_argv[1:]])}


def device_name(device: str) -> str:
    """Return the name of the GPU, or of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo")
    names = lines.read_text().splitlines() if lines.exists() else []
    model = next((line.partition(":")[2].strip() for line in names if "model name" in line), "")
    return model or platform.machine()


def synchronize(device: str) -> None:
    """Wait until the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: str, work: Callable[[], object], runs: int = 3) -> float:
    """Return the median duration of `work`; on a GPU after a first call that is not counted."""
    warm_up = 1 if device == "cuda" else 0
    runs = runs if device == "cuda" else 1
    times = []
    for number in range(warm_up + runs):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        if number >= warm_up:
            times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def reset_peak_memory(device: str) -> None:
    """Start a new maximum of the device's memory, after its cache is freed."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gib(device: str) -> float | None:
    """Return the peak of allocated memory since `reset_peak_memory`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    folder = Path(__file__).parent
    try:
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
