"""A run that hangs ends all the same: whatever phase lasts longer than a call may take is told, with the stacks of all threads."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_LOOK_S = 1.0


class Watchdog:
    """While it is entered, a thread looks at how long the phase told by `begin` has lasted. After `limit_s` it writes the stacks of this
    process into `stacks`, says so on stderr, calls `on_expiry` and ends the process and its children with exit code 1: whatever hangs in
    this process will not hear of it otherwise. Calls to workers elsewhere have deadlines of their own, which end the run in order."""

    def __init__(self, limit_s: float, stacks: Path, on_expiry: Callable[[], object]) -> None:
        self.limit_s = limit_s
        self.stacks = stacks
        self.on_expiry = on_expiry
        self._phase, self._since = "starting", time.monotonic()
        self._over = threading.Event()

    def begin(self, phase: str) -> None:
        """Another phase begins, with as much time."""
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
        while not self._over.wait(_LOOK_S):
            if time.monotonic() - self._since > self.limit_s:
                self._expire()

    def _expire(self) -> None:
        with self.stacks.open("w") as file:
            faulthandler.dump_traceback(file)
        self.on_expiry()
        line = f"error: {self._phase} was not over within {self.limit_s:g} s\n  at: {self.stacks} (the stacks of all threads)\n"
        print(
            f"{line}  help: trainer.timeouts.call_s sets the deadline", file=sys.stderr, flush=True
        )
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(1)
