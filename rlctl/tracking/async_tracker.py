"""Tracker in its own thread with a bounded queue: a slow or failing one never blocks the run."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from rlctl.errors import ResourceError, RlctlError
from rlctl.tracking.tracker import RunInfo, Tracker

MAX_FAILURES = 3
_EXIT_GRACE_S = 5.0  # for other threads and exit handlers to complete
_POLL_S = 0.05


@dataclass(frozen=True)
class TrackerTimeouts:
    """Limits of a tracker: queued calls, and seconds for the start, each call and the end."""

    queue_size: int
    start_s: float
    call_s: float
    finish_s: float


@dataclass(frozen=True)
class TrackerCall:
    """Queued call: the name of the method, its training step if any, and how to apply it."""

    name: str
    step: int | None
    apply: Callable[[Tracker], object]


# The steps to replay to a tracker, and one call for each of them.
History = tuple[Collection[int], Iterable[TrackerCall]]


class AsyncTracker:
    """Tracker that runs in a daemon thread.

    Only `_run` and the methods that it calls run in that thread. Both threads share the queue and a
    few single values. `disabled_reason` is None while the tracker is enabled; `missed` holds the
    steps that were not delivered; `last_error` describes the last exception.
    """

    def __init__(self, name: str, tracker: Tracker, timeouts: TrackerTimeouts) -> None:
        self.name = name
        self.tracker = tracker
        self.timeouts = timeouts
        self.disabled_reason: str | None = None
        self.num_failures = 0
        self.last_error: str | None = None
        self.missed: set[int | None] = set()
        self._queue: SimpleQueue[TrackerCall | None] = SimpleQueue()
        self._started: Future[str | None] = Future()
        self._current: tuple[TrackerCall, float] | None = None  # the running call, and its start
        self._thread: threading.Thread | None = None

    def start(self, run: RunInfo, history: Callable[[bool], History]) -> None:
        """Start the thread, which starts the tracker and then replays `history(full_replay)`.

        `full_replay` is true if the tracker gave the run another id than the one in `run.trackers`.
        """
        self._thread = threading.Thread(
            target=self._run, args=(run, history), name=f"tracker {self.name}", daemon=True
        )
        self._thread.start()

    def wait_for_start(self) -> str | None:
        """Return the id that the tracker gave the run.

        Raises the RlctlError of its `start`, an RlctlError for any other exception, and
        ResourceError after `start_s` seconds.
        """
        hint = (
            f"remove {self.name} from trainer.logger, "
            f"or set trainer.tracking.modes.{self.name} to a mode that needs no network"
        )
        try:
            return self._started.result(self.timeouts.start_s)
        except FutureTimeout as error:
            self._disable("it did not start")
            message = (
                f"logger {self.name} did not start within {self.timeouts.start_s:g} s "
                "(trainer.tracking.start_s)"
            )
            raise ResourceError(message, hint=hint) from error
        except (RlctlError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise RlctlError(
                f"logger {self.name} failed to start: {type(error).__name__}: {error}", hint=hint
            ) from error

    def send(self, call: TrackerCall) -> None:
        """Queue a call without waiting; disable the tracker if it hangs or its queue is full."""
        if self.disabled_reason is None and (reason := self._overdue()):
            self._disable(reason)
        if self.disabled_reason is None and self._queue.qsize() >= self.timeouts.queue_size:
            self._disable(
                f"{self.timeouts.queue_size} calls are waiting (trainer.tracking.queue_size)"
            )
        if self.disabled_reason is None:
            self._queue.put(call)
        else:
            self.missed.add(call.step)

    def close(self, finish: TrackerCall) -> None:
        """Queue `finish` as the last call."""
        if self.disabled_reason is None:
            self._queue.put(finish)
            self._queue.put(None)

    def wait_for_end(self, deadline: float) -> None:
        """Wait until all queued calls are delivered, at most until `deadline` (`time.monotonic`).

        Calls that are not delivered by then count as missed.
        """
        if self._thread is None or not self._has_started:
            return
        while self.disabled_reason is None and self._thread.is_alive():
            self._thread.join(_POLL_S)
            if reason := self._overdue():
                self._disable(reason)
            elif time.monotonic() > deadline and self._thread.is_alive():
                self._disable(
                    f"it did not finish within {self.timeouts.finish_s:g} s "
                    "after the end of the run (trainer.tracking.finish_s)"
                )
        if not self.is_stuck:
            self._thread.join(_EXIT_GRACE_S)  # the thread still counts what it missed

    @property
    def is_stuck(self) -> bool:
        """True if the tracker was disabled during a call that has not returned."""
        return (
            self.disabled_reason is not None
            and self._current is not None
            and self._thread is not None
            and self._thread.is_alive()
        )

    @property
    def delivered_everything(self) -> bool:
        """True if the tracker has ended and every call was delivered."""
        return (
            self._has_started
            and self.disabled_reason is None
            and not self.missed
            and self._thread is not None
            and not self._thread.is_alive()
        )

    def missed_ranges(self) -> list[tuple[int, int]]:
        """Return the missed steps as (first, last) ranges, both inclusive."""
        ranges: list[tuple[int, int]] = []
        for step in sorted(step for step in self.missed.copy() if step is not None):
            first = ranges.pop()[0] if ranges and ranges[-1][1] == step - 1 else step
            ranges.append((first, step))
        return ranges

    @property
    def _has_started(self) -> bool:
        return self._started.done() and self._started.exception() is None

    def _overdue(self) -> str | None:
        current = self._current
        if current is None or time.monotonic() - current[1] < self.timeouts.call_s:
            return None
        limit = f"{self.timeouts.call_s:g} s (trainer.tracking.call_s)"
        return f"{current[0].name} took longer than {limit}"

    def _disable(self, reason: str) -> None:
        """Accept no more calls; count the running and the queued ones as missed."""
        self.disabled_reason = reason
        current = self._current
        if current is not None:
            self.missed.add(current[0].step)
        with contextlib.suppress(Empty):
            while True:
                call = self._queue.get_nowait()
                if call is not None:
                    self.missed.add(call.step)
        self._queue.put(None)  # ends a thread that waits for a call

    def _run(self, run: RunInfo, history: Callable[[bool], History]) -> None:
        try:
            run_id = self.tracker.start(run)
        except BaseException as error:  # `wait_for_start` raises it in the run's thread
            self._started.set_exception(error)
            return
        self._started.set_result(run_id)
        steps, calls = history(run_id is not None and run_id != run.trackers.get(self.name))
        self.missed.update(steps)  # until they are replayed
        for call in calls:
            if self.disabled_reason is not None:
                return
            self.missed.discard(call.step)
            self._apply(call)
        while self.disabled_reason is None and (call := self._queue.get()) is not None:
            self._apply(call)

    def _apply(self, call: TrackerCall) -> None:
        self._current = (call, time.monotonic())
        try:
            call.apply(self.tracker)
        except Exception as error:  # a failing tracker must not stop the run
            self._count_failure(call, error)
        self._current = None

    def _count_failure(self, call: TrackerCall, error: Exception) -> None:
        self.num_failures += 1
        self.last_error = f"{call.name}: {type(error).__name__}: {error}"
        self.missed.add(call.step)
        if self.num_failures >= MAX_FAILURES:
            self._current = None
            self._disable(f"{MAX_FAILURES} failures, the last in {self.last_error}")


def force_exit_after_main(exit_code: int) -> None:
    """Exit the process `_EXIT_GRACE_S` seconds after its main thread ends.

    SDKs of trackers wait at exit, without a limit, for the call that is stuck.
    """

    def force_exit() -> None:
        threading.main_thread().join()
        time.sleep(_EXIT_GRACE_S)
        os._exit(exit_code)

    threading.Thread(target=force_exit, name="force exit", daemon=True).start()
