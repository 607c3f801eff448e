"""Growth of a long run: memory, descriptors, threads and files of all its processes.

A run of 210 steps saves and validates every tenth. What it holds is measured around step 50 and
around step 200: the least of many samples, since the threads and files of a checkpoint come and go.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import start, with_marker
from tests.settings import given

STEPS = (50, 200)
_WINDOW = 10  # steps of one measurement
_SAMPLE_S = 0.1
SETTINGS = [
    *given(epochs=100, steps=STEPS[1] + _WINDOW, save=10, validate=10, keep=2),
    "trainer.logger=[console]",
]
# Growth from step 50 to step 200 that is no leak: allocators keep a little more for a while.
SLACK = {"MiB": 24, "descriptors": 2, "threads": 2, "processes": 0, "files": 4}

Amounts = Counter[tuple[str, str]]  # by process or place, and by unit


@dataclass(frozen=True)
class Growth:
    """Amount at step 50 and at step 200, such as the MiB of the driver."""

    place: str
    unit: str
    before: int
    after: int

    @property
    def is_leak(self) -> bool:
        """True if it has grown by more than the slack."""
        return self.after - self.before > SLACK[self.unit]

    def __str__(self) -> str:
        sign = "LEAK " if self.is_leak else ""
        return f"{sign}{self.place}: {self.before} → {self.after} {self.unit}"


def growths(arguments: Sequence[str], cwd: Path, run: Path) -> list[Growth]:
    """Run `rlctl` with these arguments, which write to the folder `run`; return what has grown."""
    marker = f"leaks-{os.getpid()}-{time.time_ns()}"
    temporary = cwd / "tmp"
    temporary.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        process = start(*arguments, cwd=cwd, marker=marker, process=True)
    lines = run / "metrics.jsonl"
    least: dict[int, Amounts] = {}
    while process.poll() is None:
        done = lines.read_bytes().count(b"\n") if lines.exists() else 0
        for step in STEPS:
            if step <= done < step + _WINDOW:
                found = _amounts(process.pid, marker, run, temporary)
                kept = least.setdefault(step, found)
                for key in kept.keys() | found.keys():
                    kept[key] = min(kept[key], found[key])
        time.sleep(_SAMPLE_S)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert least.keys() == set(STEPS), f"only measured at {sorted(least)}"
    before, after = (least[step] for step in STEPS)
    return [Growth(*key, before[key], after[key]) for key in sorted(before.keys() | after.keys())]


def _amounts(driver: int, marker: str, run: Path, temporary: Path) -> Amounts:
    """Return what the processes with this marker hold now."""
    found: Amounts = Counter()
    folders, shared = {temporary}, set[str]()
    for process in with_marker(marker):
        with suppress(psutil.Error, OSError):
            # A worker of Ray adds the call that it is in: `ray::Process.call`.
            name = "driver" if process.pid == driver else process.name().partition(".")[0]
            memory = process.memory_info()
            for unit, amount in (
                ("MiB", (memory.rss - memory.shared) // 2**20),  # without pages of files
                ("descriptors", process.num_fds()),
                ("threads", process.num_threads()),
                ("processes", 1),
            ):
                found[name, unit] += amount
            shared |= {each.path for each in process.memory_maps() if "/dev/shm/" in each.path}
            folders |= {Path(each) for each in _session_folders(process)}
    found["/dev/shm", "files"] = len(shared)
    found["temporary folders", "files"] = sum(map(_num_files, folders))
    by_step = _num_files(run / "generations")  # one for each validation
    found["folder of the run", "files"] = _num_files(run) - by_step
    return found


def _session_folders(process: psutil.Process) -> set[str]:
    """Return the folders of Ray's session that the command line of a process names."""
    return set(re.findall(r"/tmp/rlctl-ray-\w+", " ".join(process.cmdline())))


def _num_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))
