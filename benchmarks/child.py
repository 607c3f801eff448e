"""Time, memory and metrics of a command, measured in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Wall-clock and CPU time in seconds, peak memory in MB, and the machine's load at the end."""

    wall: float
    cpu: float
    memory: float
    load: float

    def __str__(self) -> str:
        used = f"{self.wall:6.2f} s  cpu {self.cpu:6.2f} s  {self.memory:5.0f} MB"
        return f"{used}  load {self.load:.1f}"


def rlctl(folder: Path, *arguments: str) -> Usage:
    """Run an rlctl command in `folder` and return what it used."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "rlctl", *arguments]
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os.execv(command[0], command)
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"rlctl {' '.join(arguments)} failed")
    return Usage(
        wall=time.perf_counter() - start,
        cpu=used.ru_utime + used.ru_stime,
        memory=used.ru_maxrss / 1024,
        load=os.getloadavg()[0],
    )


def metric_rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics, one per step and one per validation."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
