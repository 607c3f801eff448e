"""Deadlines by progress: a process may take as long as it needs while it uses CPU time.

A test that waits by the clock fails on a slow machine. The limit here is time without progress; the
overall timeout of pytest ends a process that spins forever.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

import psutil

STALLED_S = 120.0  # without 10 ms of CPU time in the process or its children
_POLL_S = 0.05


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants; 0 if it does not exist."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            total += sum(each.cpu_times()[:4])  # user and system, own and of reaped children
    except psutil.NoSuchProcess:
        pass
    return total


def wait_until(done: Callable[[], bool], pid: int, what: str) -> None:
    """Wait until `done()`; raise `subprocess.TimeoutExpired` if process `pid` makes no progress."""

    def used() -> float:
        # The polls of this thread are no progress.
        return cpu_seconds(pid) - (time.thread_time() if pid == os.getpid() else 0.0)

    last, since, poll = used(), time.monotonic(), _POLL_S
    while not done():
        if time.monotonic() - since > STALLED_S:
            raise subprocess.TimeoutExpired(what, STALLED_S)
        time.sleep(poll)
        poll = min(2 * poll, 1.0) if time.monotonic() - since > 10 else _POLL_S
        # The sum falls if a process ends whose parent does not reap it, as Ray's do.
        if time.monotonic() - since > STALLED_S / 2 and abs((now := used()) - last) > 0.01:
            last, since = now, time.monotonic()
