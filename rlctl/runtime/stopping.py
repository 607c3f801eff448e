"""Stopping a run from outside: the step under way is finished and saved, within a deadline."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from rlctl.errors import Terminated

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_SAME_S = 1.0  # `timeout` and cluster managers signal a process and its group: two signals, one wish


class Stopping:
    """While it is entered, Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP break no step off: `asked` tells the trainer, which ends after the step.

    A second signal breaks off at once, and so does the end of `deadline_s`. What a signal to the whole group did to a worker is taken for
    what it is: an error after a signal leaves as that signal. Outside the main thread nothing is changed.
    """

    def __init__(self, deadline_s: float, say: Callable[[str], object]) -> None:
        self.deadline_s = deadline_s
        self.say = say
        self._number: int | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self._number is not None

    def error(self) -> BaseException:
        """What ends the run: KeyboardInterrupt (exit code 130) or Terminated (143, or 129 for a lost terminal)."""
        if self._number == signal.SIGINT:
            return KeyboardInterrupt()
        return Terminated(signal.SIGHUP if self._number == signal.SIGHUP else signal.SIGTERM)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            wanted = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # `nohup` stays in force
            self._before = {number: signal.signal(number, self._hear) for number in wanted}
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._too_late)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in self._before.items():
            signal.signal(number, (lambda *_: None) if self.asked and number != signal.SIGALRM else before)
        if self.asked and isinstance(error, Exception):
            raise self.error() from error

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self._number is None:
            self._number, self._since = number, time.monotonic()
            self.say(f"{signal.Signals(number).name}: finishing the step and saving, {self.deadline_s:g} s at most; once more breaks off")
            signal.setitimer(signal.ITIMER_REAL, self.deadline_s)
        elif time.monotonic() - self._since > _SAME_S:
            raise self.error()

    def _too_late(self, _number: int, _frame: FrameType | None) -> None:
        self.say(f"the step was not finished and saved within {self.deadline_s:g} s: broken off")
        raise self.error()
