"""One tracker in a thread of its own behind a bounded queue: nothing that it does, or fails to do, holds up the run."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from rlctl.errors import ResourceError, RlctlError
from rlctl.tracking.tracker import RunInfo, Tracker

MAX_FAILURES = 3
_LAST_WORDS_S = 5.0  # for what others have to do when the process ends
_A_MOMENT = 0.05  # seconds between two looks at a tracker that is waited for


@dataclass(frozen=True)
class TrackerTimeouts:
    """How patient a run is with its trackers: calls that may wait in the queue, and seconds for a start, for one call, for the end."""

    queue_size: int
    start_s: float
    call_s: float
    finish_s: float


@dataclass(frozen=True)
class TrackerCall:
    """One thing to tell a tracker: `what` it is in a word, the step that it belongs to if to any, and how to say it."""

    what: str
    step: int | None
    say: Callable[[Tracker], object]


# Steps that a tracker lacks, and a call for each of them.
History = tuple[Collection[int], Iterable[TrackerCall]]


class AsyncTracker:
    """Everything but `_work` and what it calls runs in the run's own thread; the two share the queue and a few single values.

    `off` is why it was switched off, or None; `missed` are the steps that did not reach it, `last_error` is what it raised last.
    """

    def __init__(self, name: str, tracker: Tracker, patience: TrackerTimeouts) -> None:
        self.name = name
        self.tracker = tracker
        self.patience = patience
        self.off: str | None = None
        self.failures = 0
        self.last_error: str | None = None
        self.missed: set[int | None] = set()
        self._queue: SimpleQueue[TrackerCall | None] = SimpleQueue()
        self._started: Future[str | None] = Future()
        self._current: tuple[TrackerCall, float] | None = None  # what it is at, and since when
        self._thread: threading.Thread | None = None

    def start(self, run: RunInfo, history: Callable[[bool], History]) -> None:
        """Begin to start it. What it is told first is `history(anew)`: anew if it gives the run an id other than the one it had."""
        self._thread = threading.Thread(
            target=self._work, args=(run, history), name=f"tracker {self.name}", daemon=True
        )
        self._thread.start()

    def wait_for_start(self) -> str | None:
        """The id that it gives the run. Errors: what `start` raised; ResourceError when it took too long."""
        hint = f"leave {self.name} out of trainer.logger, or set trainer.tracking.modes.{self.name} to one that needs no network"
        try:
            return self._started.result(self.patience.start_s)
        except NotInTime as error:
            self._switch_off("it did not start")
            message = f"logger {self.name} has not started after {self.patience.start_s:g} s (trainer.tracking.start_s)"
            raise ResourceError(message, hint=hint) from error
        except (RlctlError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise RlctlError(
                f"logger {self.name} does not start: {type(error).__name__}: {error}", hint=hint
            ) from error

    def send(self, call: TrackerCall) -> None:
        """Put a call into the queue. Never waits: a tracker that lags too far behind, or hangs, is switched off."""
        if self.off is None and (stuck := self._stuck()):
            self._switch_off(stuck)
        if self.off is None and self._queue.qsize() >= self.patience.queue_size:
            self._switch_off(
                f"it lags {self.patience.queue_size} calls behind (trainer.tracking.queue_size)"
            )
        if self.off is None:
            self._queue.put(call)
        else:
            self.missed.add(call.step)

    def end(self, finish: TrackerCall) -> None:
        """`finish` is its last call."""
        if self.off is None:
            self._queue.put(finish)
            self._queue.put(None)

    def wait_for_end(self, deadline: float) -> None:
        """Wait until it has said everything; `deadline` is a time of `time.monotonic`. What has not been said by then is missed."""
        if (
            self._thread is None
            or not self._started.done()
            or self._started.exception() is not None
        ):
            return
        while self.off is None and self._thread.is_alive():
            self._thread.join(_A_MOMENT)
            if stuck := self._stuck():
                self._switch_off(stuck)
            elif time.monotonic() > deadline and self._thread.is_alive():
                self._switch_off(
                    f"it was not done {self.patience.finish_s:g} s after the run's end (trainer.tracking.finish_s)"
                )
        if not self.hangs:
            self._thread.join(_LAST_WORDS_S)  # it still counts what it has missed

    @property
    def hangs(self) -> bool:
        """Whether it was given up in the middle of a call."""
        return (
            self.off is not None
            and self._current is not None
            and self._thread is not None
            and self._thread.is_alive()
        )

    @property
    def took_everything(self) -> bool:
        """Whether it took all that it was told until the end."""
        started = self._started.done() and self._started.exception() is None
        return (
            started
            and self.off is None
            and not self.missed
            and self._thread is not None
            and not self._thread.is_alive()
        )

    def missed_steps(self) -> list[tuple[int, int]]:
        """The steps that did not reach it, as ranges: first and last, both included."""
        ranges: list[tuple[int, int]] = []
        for step in sorted(step for step in self.missed.copy() if step is not None):
            first = ranges.pop()[0] if ranges and ranges[-1][1] == step - 1 else step
            ranges.append((first, step))
        return ranges

    def _stuck(self) -> str | None:
        current = self._current
        if current is None or time.monotonic() - current[1] < self.patience.call_s:
            return None
        return f"{current[0].what} hangs for more than {self.patience.call_s:g} s (trainer.tracking.call_s)"

    def _switch_off(self, why: str) -> None:
        """No more calls. What waits in the queue or is being said counts as missed."""
        self.off = why
        current = self._current
        if current is not None:
            self.missed.add(current[0].step)
        with contextlib.suppress(Empty):
            while True:
                call = self._queue.get_nowait()
                if call is not None:
                    self.missed.add(call.step)
        self._queue.put(None)  # wakes a thread that waits for a call, so that it ends

    def _work(self, run: RunInfo, history: Callable[[bool], History]) -> None:
        try:
            given = self.tracker.start(run)
        except BaseException as error:  # handed to the thread that waits, which raises it
            self._started.set_exception(error)
            return
        self._started.set_result(given)
        steps, calls = history(given is not None and given != run.trackers.get(self.name))
        self.missed.update(steps)  # until they are told
        for call in calls:
            if self.off is not None:
                return
            self.missed.discard(call.step)
            self._say(call)
        while self.off is None and (call := self._queue.get()) is not None:
            self._say(call)

    def _say(self, call: TrackerCall) -> None:
        self._current = (call, time.monotonic())
        try:
            call.say(self.tracker)
        except Exception as error:  # a mirror may break, the run goes on
            self._failed(call, error)
        self._current = None

    def _failed(self, call: TrackerCall, error: Exception) -> None:
        self.failures += 1
        self.last_error = f"{call.what}: {type(error).__name__}: {error}"
        self.missed.add(call.step)
        if self.failures >= MAX_FAILURES:
            self._current = None
            self._switch_off(f"{MAX_FAILURES} failures, the last in {self.last_error}")


def leave_in_any_case(exit_code: int) -> None:
    """End the process soon after its main thread has ended. SDKs wait at exit, without a limit, for the very thing that hangs."""

    def leave() -> None:
        threading.main_thread().join()
        time.sleep(_LAST_WORDS_S)
        os._exit(exit_code)

    threading.Thread(target=leave, name="leave in any case", daemon=True).start()
