"""Stopping a run from outside: the step under way is finished and saved, within a deadline."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rlctl.errors import Terminated, TimeUp

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_MARGIN = 1.2  # steps differ
_SOON_S = 0.001  # an interval of 0 would switch the timer off
_SAME_S = (
    1.0  # `timeout` and cluster managers signal a process and its group: two signals, one wish
)


@dataclass
class Stopping:
    """While it is entered, Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP break no step off: `asked` tells the trainer, which ends after the step. So
    do a file `request` that somebody made, and `end_by` (seconds since the epoch), by which the run should be saved and over.

    A second signal breaks off at once, and so does the end of `deadline_s`. What a signal to the whole group did to a worker is taken for
    what it is: an error after a signal leaves as that signal. Outside the main thread no signal is heard.
    """

    deadline_s: float
    say: Callable[[str], object]
    request: Path
    end_by: float | None = None
    _number: int | None = None  # SIGALRM: time is up
    _since: float = 0.0
    _longest_s: float = 0.0
    _looked: float | None = None
    _before: dict[int, Any] = field(default_factory=dict)

    @property
    def asked(self) -> bool:
        return self._number is not None

    def look(self, writing_s: float) -> None:
        """At the end of each step, before it may be saved: would another one, as long as the longest, and a checkpoint that takes
        `writing_s` to write, come too late? Has somebody made the request?"""
        now = time.time()
        if self._looked is not None:
            self._longest_s = max(self._longest_s, now - self._looked)
        self._looked = now
        if self.asked:
            return
        if self.request.exists():
            self._ask(signal.SIGTERM, "asked to stop")
        elif (
            self.end_by is not None
            and now + _MARGIN * self._longest_s + 2 * writing_s > self.end_by
        ):
            self._ask(
                signal.SIGALRM,
                f"{max(0.0, self.end_by - now):.0f} s are left, too few for another step",
            )

    def error(self) -> BaseException:
        """What ends the run: KeyboardInterrupt (exit code 130), Terminated (143, or 129 for a lost terminal) or TimeUp (0)."""
        if self._number == signal.SIGINT:
            return KeyboardInterrupt()
        if self._number == signal.SIGALRM:
            return TimeUp()
        return Terminated(signal.SIGHUP if self._number == signal.SIGHUP else signal.SIGTERM)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            wanted = [
                number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
            ]  # `nohup` stays in force
            self._before = {number: signal.signal(number, self._hear) for number in wanted}
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._ring)
            if self.end_by is not None:
                signal.setitimer(signal.ITIMER_REAL, max(_SOON_S, self.end_by - time.time()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in self._before.items():
            signal.signal(
                number, (lambda *_: None) if self.asked and number != signal.SIGALRM else before
            )
        if self.asked and isinstance(error, Exception):
            raise self.error() from error

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if not self.asked:
            self._ask(number, signal.Signals(number).name)
        elif time.monotonic() - self._since > _SAME_S:
            raise self.error()

    def _ask(self, number: int, why: str) -> None:
        self._number, self._since = number, time.monotonic()
        self.say(
            f"{why}: finishing the step and saving, {self.deadline_s:g} s at most; once more breaks off"
        )
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, self.deadline_s)

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        if not self.asked:
            self._ask(signal.SIGALRM, "time is up")
            return
        self.say(f"the step was not finished and saved within {self.deadline_s:g} s: broken off")
        raise Terminated(signal.SIGTERM) if self._number == signal.SIGALRM else self.error()
