"""Process that drives a run: its start, and its identity, which shows later that it has exited."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, NoReturn

import psutil

FORK_SERVER = "rlctl-forks"  # name of the process that forks a run's workers


@dataclass(frozen=True)
class DriverProcess:
    """Process identified by pid, start time, host and boot, so that a reused pid is not confused.

    `started` is in clock ticks since boot on Linux (unaffected by clock changes), elsewhere in
    seconds since the epoch.
    """

    pid: int
    started: float
    host: str
    boot_id: str

    @classmethod
    def current(cls) -> DriverProcess:
        """Return the identity of this process."""
        started = _started(os.getpid())
        assert started is not None  # this process exists
        return cls(os.getpid(), started, socket.gethostname(), _boot_id())

    def alive(self) -> bool | None:
        """Return True if the process is running; None if it is on another host."""
        if self.host != socket.gethostname():
            return None
        return self.boot_id == _boot_id() and _started(self.pid) == self.started


def uptime() -> float:
    """Return seconds since boot, the same for all processes and independent of the clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def die_with_parent() -> None:
    """Send SIGTERM to this process when its parent exits; for `preexec_fn`.

    Linux only (prctl, PR_SET_PDEATHSIG = 1); no-op elsewhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def start_rlctl(
    words: Sequence[str],
    log: IO[bytes] | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `rlctl WORDS`, out of reach of Ctrl-C; it receives SIGTERM when this process exits.

    With `log` it writes there, has no stdin, and leads its own session.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "rlctl", *words],
        stdin=None if log is None else subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        cwd=cwd,
        env=env,
        preexec_fn=die_with_parent,
        start_new_session=log is not None,
        process_group=0 if log is None else None,
    )


def kill_and_exit(more: Iterable[psutil.Process] = ()) -> NoReturn:
    """Kill the children of this process and `more`, and exit with code 1 without any cleanup."""
    for process in {*psutil.Process().children(recursive=True), *more}:
        with suppress(psutil.Error):  # it has exited, or belongs to another user
            process.kill()
    os._exit(1)


def _started(pid: int) -> float | None:
    """Return the start time of the process, or None if it does not exist or is a zombie."""
    if _has_proc():
        try:
            # proc(5): field 2, the command, is in parentheses and may contain any character;
            # field 3 is the state, field 22 the start time.
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else float(fields[19])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


@cache
def _has_proc() -> bool:
    return Path("/proc/self/stat").exists()


@cache
def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else str(int(psutil.boot_time()))
