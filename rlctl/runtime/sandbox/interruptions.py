"""Interruptions of a worker process that no call in it is at fault for.

The kernel, another program or a suspended machine kills or stops a process. Calls in progress are
then repeated once, in a new process.
"""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

_continued_at = -math.inf  # time.monotonic of the newest SIGCONT


def is_from_signal(status: int) -> bool:
    """Return True for the exit status of a signal, except for that of the limit of CPU time.

    A guard exits as a shell does, with 128 plus the number of its worker's signal.
    """
    number = status - 128
    if status < 0:
        number = -status
    return 0 < number < signal.NSIG and number != signal.SIGXCPU


def is_stopped(pid: int | None) -> bool:
    """Return True if the process is stopped now; False where the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in "Tt"


def record_stops() -> None:
    """Record from now on when this process is continued after it was stopped."""

    def record(*_: object) -> None:
        global _continued_at
        _continued_at = time.monotonic()

    signal.signal(signal.SIGCONT, record)


def end_if_stopped_since(began: float) -> None:
    """Kill this process if it was stopped after `began`, a time of `time.monotonic`.

    Called after a call that took too long, so that it is repeated.
    """
    if _continued_at >= began:
        os.kill(os.getpid(), signal.SIGKILL)
