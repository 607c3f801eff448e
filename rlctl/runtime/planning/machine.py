"""Checks of the machine for `rlctl doctor`: GPUs, cores, memory, disks."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rlctl.cores import available_cores
from rlctl.files import existing_parent
from rlctl.runtime.sandbox.worker_settings import container_memory

GIB = 1024**3

# Oldest NVIDIA driver for a major version of CUDA ("CUDA Compatibility", minor version
# compatibility). torch finds no GPU with an older one.
_LEAST_DRIVER = {"12": 525, "13": 580}
# Least compute capability of the GPUs that a build for a major version of CUDA has kernels for.
_LEAST_CAPABILITY = {"13": 7.5}


@dataclass(frozen=True)
class Check:
    """Result of one check.

    With a warning runs are slower or fail later; with a fault they do not start. `remedy` is the
    command that fixes it.
    """

    check: str
    state: Literal["ok", "warning", "fault"]
    message: str
    remedy: str | None = None


def check_space(check: str, path: Path, free: int, total: int) -> Check:
    """Check that a disk has enough free space, given in bytes.

    Ray stops writing objects at 95 % (its `local_fs_capacity_threshold`).
    """
    message = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free at {path}"
    remedy = f"du -xh -d1 {path} | sort -h | tail"
    if free < GIB:
        return Check(check, "fault", f"{message}: less than 1 GiB", remedy)
    if free < 0.05 * total or free < 5 * GIB:
        return Check(
            check,
            "warning",
            f"{message}: checkpoints fill that soon, and Ray stops writing objects at 95 %",
            remedy,
        )
    return Check(check, "ok", message)


def check_torch(installed: str, cuda: str | None, gpus: Sequence[str]) -> Check:
    """Check that torch can use the GPUs of a machine, which are as `visible_gpus` returns them.

    `cuda` is the CUDA version that torch was built for; None for a CPU build.
    """
    number = installed.partition("+")[0]
    if gpus and cuda is None:
        message = f"torch {installed} is a CPU build and cannot use {len(gpus)} GPUs ({gpus[0]})"
        return Check("gpus", "warning", message, f"pip install --force-reinstall torch=={number}")
    first = next(iter(gpus), "")
    driver = re.search(r", (\d+)[.\d]*$", first)
    major = (cuda or "").partition(".")[0]
    least = _LEAST_DRIVER.get(major)
    if driver and least and int(driver[1]) < least:
        message = f"torch {installed} is for CUDA {cuda}, which needs driver {least}: {first}"
        return Check("gpus", "fault", message, f"install NVIDIA's driver {least} or newer")
    capability = re.search(r", (\d+\.\d+), [.\d]+$", first)
    if capability and float(capability[1]) < (wanted := _LEAST_CAPABILITY.get(major, 0.0)):
        message = f"torch {installed} is for GPUs of capability {wanted} or more: {first}"
        return Check("gpus", "fault", message, "a newer GPU, or a build of torch for this one")
    build = "torch for CPUs"
    if cuda:
        build = f"torch for CUDA {cuda}"
    return Check(
        "gpus",
        "ok",
        f"{build}; {'; '.join(gpus) or 'no NVIDIA GPU here: training runs on the CPU'}",
    )


def cores_check() -> Check:
    """Check that OMP_NUM_THREADS does not exceed the available cores."""
    cores = available_cores()
    threads = os.environ.get("OMP_NUM_THREADS")
    message = f"{cores} of {os.cpu_count()} may be used; OMP_NUM_THREADS is {threads or 'not set'}"
    if threads is not None and threads.isdecimal() and int(threads) > cores:
        return Check(
            "cores", "warning", f"{message}: threads wait for each other", "unset OMP_NUM_THREADS"
        )
    return Check("cores", "ok", message)


def memory_checks() -> Iterator[Check]:
    """Check that Ray and one worker fit into memory; empty without psutil."""
    if find_spec("psutil") is None:  # reported with the packages
        return
    import psutil

    memory = psutil.virtual_memory()
    bound = container_memory()
    message = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    if bound is not None:
        message += f", the container may use {bound / GIB:.1f}"
    if memory.available < 2 * GIB:
        yield Check(
            "memory",
            "warning",
            f"{message}: Ray and one worker need about 2",
            "ps aux --sort=-rss | head",
        )
    else:
        yield Check("memory", "ok", message)


def disk_check(check: str, folder: Path) -> Check:
    """Check that `folder`, or its first parent that exists, is writable and has free space."""
    path = existing_parent(folder)
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        reason = "cannot be written to"
        if not path.is_dir():
            reason = "is not a folder"
        remedy = "export RLCTL_RUNS=$HOME/runs"
        if check == "disk of Ray":
            remedy = f"sudo chmod 1777 {path}"
        return Check(check, "fault", f"{path} {reason}", remedy)
    usage = shutil.disk_usage(path)
    return check_space(check, path, usage.free, usage.total)


def shared_memory_checks() -> Iterator[Check]:
    """Check the size of /dev/shm, where Ray keeps its objects; empty without it."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return
    usage = shutil.disk_usage(path)
    message = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free at {path}"
    if usage.free < GIB:
        remedy = "sudo mount -o remount,size=8G /dev/shm"
        if Path("/.dockerenv").exists():
            remedy = "docker run --shm-size=8g …"
        yield Check(
            "shared memory", "warning", f"{message}: Ray keeps its objects in files instead", remedy
        )
    else:
        yield Check("shared memory", "ok", message)


def bytecode_check() -> Check:
    """Check that Python caches compiled modules."""
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        message = (
            "PYTHONDONTWRITEBYTECODE is set: every process compiles torch and transformers again, "
            "which takes seconds"
        )
        return Check("bytecode", "warning", message, "unset PYTHONDONTWRITEBYTECODE")
    return Check("bytecode", "ok", "compiled modules are cached")
