"""Watchdog that kills a hung run: dumps all stacks and exits."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

LOG = logging.getLogger(__name__)
_POLL_S = 1.0


class Watchdog:
    """Context manager with a thread that limits the time of each phase to `limit_s`.

    When a phase takes longer, it writes the stacks of all threads to the file `stacks`, calls
    `on_expiry`, logs an error and exits the process and its children with code 1. Calls to workers
    in other processes have their own deadlines, which stop the run in order.
    """

    def __init__(self, limit_s: float, stacks: Path, on_expiry: Callable[[], object]) -> None:
        self.limit_s = limit_s
        self.stacks = stacks
        self.on_expiry = on_expiry
        self._phase, self._since = "starting", time.monotonic()
        self._over = threading.Event()

    def begin(self, phase: str) -> None:
        """Start the phase `phase` and its time limit."""
        self._phase, self._since = phase, time.monotonic()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            if time.monotonic() - self._since > self.limit_s:
                self._expire()

    def _expire(self) -> None:
        with self.stacks.open("w") as file:
            faulthandler.dump_traceback(file)
        self.on_expiry()
        LOG.error(
            "%s did not finish within %g s\n"
            "  at: %s (the stacks of all threads)\n"
            "  help: trainer.timeouts.call_s sets the limit",
            self._phase,
            self.limit_s,
            self.stacks,
        )
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(1)
