"""Which process drives a run, told well enough to know later whether it still lives: after kill -9 nobody says so."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class DriverProcess:
    """A process, told apart from a later one of the same number by when it started, in the machine's boot of that time.

    `started` is in clock ticks since boot on Linux, which no change of the wall clock moves, elsewhere in seconds since the epoch.
    """

    pid: int
    started: float
    host: str
    boot_id: str

    @classmethod
    def current(cls) -> DriverProcess:
        started = _started(os.getpid())
        assert started is not None  # it is this process
        return cls(os.getpid(), started, socket.gethostname(), _boot_id())

    def alive(self) -> bool | None:
        """Whether it still runs; None when it is on another host and cannot be told from here."""
        if self.host != socket.gethostname():
            return None
        return self.boot_id == _boot_id() and _started(self.pid) == self.started


def die_with_parent() -> None:
    """For `preexec_fn`. Linux: SIGTERM when the parent ends (prctl, PR_SET_PDEATHSIG = 1). Elsewhere the child goes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _started(pid: int) -> float | None:
    """When the process started, or None when there is none or only its zombie."""
    if Path("/proc/self/stat").exists():
        try:
            # proc(5): field 2, the command, stands in parentheses and may hold any character; field 3 is the state, field 22 the start.
            fields = (
                Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            )
        except OSError:
            return None
        return None if fields[0] in "ZX" else float(fields[19])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else str(int(psutil.boot_time()))
