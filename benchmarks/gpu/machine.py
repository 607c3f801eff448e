"""Rung of the machine: its versions and rates; clocks and memory counters for all rungs."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl

from benchmarks.gpu.recorder import Recorder, Settings

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "flash-attn",
    "liger-kernel",
    "vllm",
    "peft",
    "ray",
    "trl",
)


def measure(settings: Settings, recorder: Recorder) -> None:
    """Write the device and versions, the rates of copies and products, and a sum over one rank."""
    for name, value in describe(settings.device).items():
        recorder.row("machine", fact=name, value=value)
    device, size = settings.device, 512 if settings.tiny else 8192
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    num_bytes = 2**24 if settings.tiny else 2**30
    held, other = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    rates: dict[str, tuple[float, str, Callable[[], object]]] = {
        "bfloat16 product": (2 * size**3 / 1e12, "TFLOP/s", lambda: matrix @ matrix),
        "copy on the device": (2 * num_bytes / 1e9, "GB/s", lambda: other.copy_(held)),
    }
    if device == "cuda":
        host = torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
        rates["host to device"] = num_bytes / 1e9, "GB/s", lambda: held.copy_(host)
        rates["device to host"] = num_bytes / 1e9, "GB/s", lambda: host.copy_(held)
    for name, (amount, unit, work) in rates.items():
        rate = amount / seconds(device, work)
        recorder.row("machine", fact=name, value=f"{rate:,.3g} {unit}")
    backend = "nccl" if device == "cuda" else "gloo"
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    ones = torch.ones(4, device=device)
    dist.all_reduce(ones)
    total = float(ones.sum())
    recorder.row("machine", fact=f"sum over one rank ({backend})", value=total, ok=total == 4)
    dist.destroy_process_group()


def describe(device: str) -> dict[str, str]:
    """Return the device, the versions and the commit."""
    facts = {"device": device_name(device), "python": platform.python_version()}
    facts |= {name: found for name in PACKAGES if (found := _version(name)) is not None}
    if device == "cuda":
        facts["CUDA"] = str(torch.version.cuda)
        facts["NCCL"] = ".".join(str(part) for part in nccl.version())
        facts["capability"] = ".".join(str(part) for part in torch.cuda.get_device_capability())
        free, total = torch.cuda.mem_get_info()
        facts["memory"] = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return facts | {"commit": _commit()}


def command() -> str:
    """Return the command of this process."""
    return " ".join(["python", *sys.orig_argv[1:]])


def device_name(device: str) -> str:
    """Return the name of the GPU, or of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo")
    names = lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []
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
