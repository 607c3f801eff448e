"""Ends of a run before its last step.

After a request to stop, the current step is finished and saved, within a deadline. A watchdog kills
a hung run: it dumps the stacks of all threads and exits.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rlctl.debugging import on_breakpoint, reached_breakpoint
from rlctl.errors import RlctlError, Terminated, TimeUp
from rlctl.runs.process import kill_and_exit

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_MARGIN = 1.2  # steps differ
_MIN_TIMER_S = 0.001  # 0 would disable the timer
# `timeout` and cluster managers signal both a process and its group: two signals, one request.
_SAME_REQUEST_S = 1.0


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Handle a request that arrives in the block at its end. No-op outside the main thread."""
    arrived: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` relies on it
                before[number] = signal.signal(number, lambda received, _: arrived.append(received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


@dataclass
class Stopping:
    """Context in which requests to stop set `asked` instead of interrupting the current step.

    A request is SIGINT, SIGTERM, SIGUSR1 or SIGHUP, the existence of the file `request`, or too
    little time for another step before `end_by` (on the clock `time.monotonic`).

    A second signal interrupts at once, and so does the expiry of `deadline_s` after a request. An
    error after a request is raised as that request, because a signal to the process group also
    reaches the workers. Signals are handled only in the main thread.
    """

    deadline_s: float
    log: Callable[[str], object]
    request: Path
    end_by: float | None = None
    _number: int | None = None  # signal of the request; SIGALRM: `end_by`
    _since: float = 0.0
    _longest_s: float = 0.0
    _checked_at: float | None = None
    _before: dict[int, Any] = field(default_factory=dict)

    @property
    def asked(self) -> bool:
        """True if the run was asked to stop."""
        return self._number is not None

    def check(self, writing_s: float) -> None:
        """Check the request file and the remaining time; call it after each step, before saving.

        Another step is assumed to take as long as the longest one so far, and a checkpoint
        `writing_s`.
        """
        now = time.monotonic()
        if self._checked_at is not None:
            self._longest_s = max(self._longest_s, now - self._checked_at)
        self._checked_at = now
        if self.asked:
            return
        if self.request.exists():
            self._ask(signal.SIGTERM, "stop requested")
        elif (
            self.end_by is not None
            and now + _MARGIN * self._longest_s + 2 * writing_s > self.end_by
        ):
            self._ask(
                signal.SIGALRM,
                f"{max(0.0, self.end_by - now):.0f} s left, not enough for another step",
            )

    def error(self) -> BaseException:
        """Return the exception of the request, which ends the run.

        KeyboardInterrupt (exit code 130), Terminated (143, or 129 after SIGHUP) or TimeUp (0).
        """
        if self._number == signal.SIGINT:
            return KeyboardInterrupt()
        if self._number == signal.SIGALRM:
            return TimeUp()
        return Terminated(signal.SIGHUP if self._number == signal.SIGHUP else signal.SIGTERM)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # An ignored signal stays ignored: `nohup` relies on it.
            handled = [
                number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
            ]
            self._before = {number: signal.signal(number, self._on_signal) for number in handled}
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_timer)
            if self.end_by is not None:
                left = self.end_by - time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, max(_MIN_TIMER_S, left))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in self._before.items():
            signal.signal(
                number, (lambda *_: None) if self.asked and number != signal.SIGALRM else before
            )
        if self.asked and isinstance(error, Exception):
            raise self.error() from error

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self.asked:
            self._ask(number, signal.Signals(number).name)
        elif time.monotonic() - self._since > _SAME_REQUEST_S:
            raise self.error()

    def _ask(self, number: int, why: str) -> None:
        self._number, self._since = number, time.monotonic()
        self.log(
            f"{why}: finishing the step and saving within {self.deadline_s:g} s; "
            "a second signal interrupts at once"
        )
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, self.deadline_s)

    def _on_timer(self, _number: int, _frame: FrameType | None) -> None:
        if not self.asked:
            self._ask(signal.SIGALRM, "time limit reached")
            return
        self.log(f"interrupted: the step was not finished and saved within {self.deadline_s:g} s")
        raise Terminated(signal.SIGTERM) if self._number == signal.SIGALRM else self.error()


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
