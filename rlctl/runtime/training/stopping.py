"""Ends of a run before its last step.

A request to stop interrupts what changes no weights; the last finished step is saved. An update in
progress is finished. A watchdog kills a hung run: it dumps the stacks of all threads and exits.
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
from rlctl.owner import is_command
from rlctl.process import kill_and_exit
from rlctl.runtime.workers.interrupts import INTERRUPTS

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_MARGIN = 1.2  # steps differ
_MIN_TIMER_S = 0.001  # 0 would disable the timer
# `timeout` and cluster managers signal both a process and its group: two signals, one request.
_SAME_REQUEST_S = 1.0
_AGAIN_S = 3.0  # until a window that is still open is interrupted again
_CHECK_INTERVAL_S = 1.0


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


@contextmanager
def restored_process() -> Iterator[None]:
    """Give a program its signal handlers and its timer back after a run.

    A command keeps the handlers: after a request to stop it ignores further ones until it exits.
    No-op outside the main thread.
    """
    if is_command() or threading.current_thread() is not threading.main_thread():
        yield
        return
    Terminated.latest = None  # of an earlier run
    numbers = (*_SIGNALS, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    began = time.monotonic()
    left_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it is no handler of Python
                signal.signal(number, handler)
        if left_s:
            left_s = max(_MIN_TIMER_S, left_s - (time.monotonic() - began))
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
        INTERRUPTS.reset()


@dataclass
class Stopping:
    """Context in which requests to stop set `asked` and interrupt an open window of `INTERRUPTS`.

    A request is SIGINT, SIGTERM, SIGUSR1 or SIGHUP, the existence of the file `request`, or too
    little time for another step before `end_by` (on the clock `time.monotonic`).

    A second signal ends the run at once, and so does a window that has not ended `deadline_s` after
    a request; an update and a checkpoint have no deadline. An error after a request is raised as
    that request, because a signal to the process group also reaches the workers. Signals are
    handled only in the main thread. `interrupt_workers` is called in a thread if a request
    interrupts.
    """

    deadline_s: float
    log: Callable[[str], object]
    request: Path
    end_by: float | None = None
    interrupt_workers: Callable[[], object] = lambda: None
    watches: bool = False  # looks for the file `request` in the middle of a step
    _is_forced: bool = False
    _ended: threading.Event = field(default_factory=threading.Event)
    _number: int | None = None  # signal of the request; SIGALRM: `end_by`
    _since: float = 0.0
    _longest_s: float = 0.0
    _checked_at: float | None = None
    _before: dict[int, Any] = field(default_factory=dict)
    _watcher: threading.Thread | None = None

    @property
    def asked(self) -> bool:
        """True if the run was asked to stop."""
        return self._number is not None

    @property
    def interrupted(self) -> bool:
        """True if a request has interrupted work, and the last finished step is to be saved."""
        return INTERRUPTS.raised and not self._is_forced

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
        if self._number == signal.SIGHUP:
            return Terminated(signal.SIGHUP)
        return Terminated(signal.SIGTERM)

    def __enter__(self) -> Self:
        INTERRUPTS.reset()
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
            self._watcher = threading.Thread(target=self._watch, name="stop-request", daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()  # from here on, no handler raises or sets the timer
        if self._watcher is not None:
            self._watcher.join()  # a signal that it sends would find the handler of the caller
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in self._before.items():
            if self.asked and number != signal.SIGALRM:
                before = _ignore
            signal.signal(number, before)
        if self.asked and isinstance(error, Exception):
            raise self.error() from error

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._ended.is_set():
            self._number = self._number or number
        elif not self.asked:
            name = "stop requested" if self.request.exists() else signal.Signals(number).name
            self._ask(number, name)
            self._interrupt()
        elif time.monotonic() - self._since > _SAME_REQUEST_S:
            self._is_forced = True
            raise self.error()

    def _watch(self) -> None:
        """Turn the file `request` into a signal while a step may be interrupted."""
        while not self._ended.wait(_CHECK_INTERVAL_S):
            if self.watches and INTERRUPTS.is_open and not self.asked and self.request.exists():
                main = threading.main_thread().ident
                assert main is not None, "the main thread has started"
                signal.pthread_kill(main, signal.SIGTERM)
                return

    def _ask(self, number: int, why: str) -> None:
        self._since = time.monotonic()
        self._number = number
        self.log(
            f"{why}: finishing the step and saving, or giving it up and saving the one before if "
            "it has changed no weights yet; the next signal interrupts at once"
        )
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, min(_AGAIN_S, self.deadline_s))

    def _interrupt(self) -> None:
        if INTERRUPTS.is_open:
            threading.Thread(target=self.interrupt_workers, daemon=True).start()
        INTERRUPTS.request()

    def _on_timer(self, _number: int, _frame: FrameType | None) -> None:
        if self._ended.is_set():
            return
        if not self.asked:
            self._ask(signal.SIGALRM, "time limit reached")
            self._interrupt()
            return
        left_s = self.deadline_s - (time.monotonic() - self._since)
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, max(_MIN_TIMER_S, left_s))
            INTERRUPTS.request()  # a callback may have swallowed the first exception
        elif INTERRUPTS.is_open:
            self._is_forced = True
            self.log(f"interrupted: the step did not end within {self.deadline_s:g} s")
            if self._number == signal.SIGALRM:
                raise Terminated(signal.SIGTERM)
            raise self.error()
        else:
            self.log("still finishing the step or saving; the next signal interrupts at once")
            INTERRUPTS.expire()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""


class Watchdog:
    """Context with a thread that limits the duration of each phase.

    When a phase exceeds `limit_s`, it writes the stacks of all threads to the file `stacks`, calls
    `on_expiry` with the error, and kills the process and its children with exit code 1, because no
    exception can interrupt a hung thread. Calls to other processes have earlier deadlines, which
    end the run with an exception. After a breakpoint in this process, or in one whose log is in the
    folder of `stacks`, phases have no limit.
    """

    def __init__(
        self, limit_s: float, stacks: Path, on_expiry: Callable[[RlctlError], object]
    ) -> None:
        self.limit_s = limit_s
        self.stacks = stacks
        self.on_expiry = on_expiry
        self._phase = "starting"
        self._since = time.monotonic()
        self._over = threading.Event()
        self._paused = threading.Event()
        self._breakpoints = on_breakpoint(self._paused.set)

    def begin(self, phase: str) -> None:
        """Start a phase and reset its timer."""
        self._since = time.monotonic()
        self._phase = phase

    def __enter__(self) -> Self:
        self._breakpoints.__enter__()
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._watcher.join()
        self._breakpoints.__exit__(None, None, None)

    def _watch(self) -> None:
        while not self._over.wait(_CHECK_INTERVAL_S):
            expired = time.monotonic() - self._since > self.limit_s
            if expired and not self._paused.is_set() and not reached_breakpoint(self.stacks.parent):
                self._expire()
                return

    def _expire(self) -> None:
        with self.stacks.open("w", encoding="utf-8") as file:
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
