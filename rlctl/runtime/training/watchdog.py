"""Watchdog that kills a hung run: it dumps the stacks of all threads and exits."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rlctl.debugging import on_breakpoint, reached_breakpoint
from rlctl.errors import RlctlError
from rlctl.runs.process import kill_and_exit

_CHECK_INTERVAL_S = 1.0


class Watchdog:
    """Context with a thread that limits the duration of each phase.

    When a phase exceeds `limit_s`, it writes the stacks of all threads to the file `stacks`, calls
    `on_expiry` with the error, and kills the process and its children with exit code 1, because no
    exception can interrupt a hung thread. Calls to other processes have earlier deadlines of their
    own, which end the run with an exception. After a breakpoint in this process, or in one whose
    log is in the folder of `stacks`, phases have no limit.
    """

    def __init__(
        self, limit_s: float, stacks: Path, on_expiry: Callable[[RlctlError], object]
    ) -> None:
        self.limit_s = limit_s
        self.stacks = stacks
        self.on_expiry = on_expiry
        self._phase, self._since = "starting", time.monotonic()
        self._over = threading.Event()
        self._paused = threading.Event()
        self._breakpoints = on_breakpoint(self._paused.set)

    def begin(self, phase: str) -> None:
        """Start a phase and reset its timer."""
        self._phase, self._since = phase, time.monotonic()

    def __enter__(self) -> Self:
        self._breakpoints.__enter__()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._breakpoints.__exit__(None, None, None)

    def _watch(self) -> None:
        while not self._over.wait(_CHECK_INTERVAL_S):
            expired = time.monotonic() - self._since > self.limit_s
            if expired and not self._paused.is_set() and not reached_breakpoint(self.stacks.parent):
                self._expire()

    def _expire(self) -> None:
        with self.stacks.open("w") as file:
            faulthandler.dump_traceback(file)
        error = RlctlError(
            f"{self._phase} did not finish within {self.limit_s:g} s",
            where=f"{self.stacks} (stacks of all threads)",
            hint="trainer.timeouts.call_s sets the deadline",
        )
        self.on_expiry(error)
        # Printed, not logged: the process exits below, and the hung thread may hold a logging lock.
        print(f"error: {error}", file=sys.stderr, flush=True)
        kill_and_exit()
