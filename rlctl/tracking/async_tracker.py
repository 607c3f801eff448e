"""Tracker in its own thread with a bounded queue: a slow or failing one never blocks the run."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from rlctl.errors import ResourceError, RlctlError
from rlctl.tracking.history import TrackerCall, replay
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


@dataclass(eq=False)
class AsyncTracker:
    """Tracker that runs in a daemon thread, started with the object.

    The thread starts the tracker, replays the recorded `steps` from `first` on, and applies the
    queued calls. If the tracker gives the run another id than the one in `run.trackers`, all
    `steps` are replayed (`full_replay`). `disabled_reason` is None while the tracker is enabled;
    `missed` holds the steps that were not delivered, `last_error` describes the last exception.
    """

    name: str
    tracker: Tracker
    timeouts: TrackerTimeouts
    run: RunInfo
    steps: Collection[int] = ()
    first: int = 0
    disabled_reason: str | None = None
    last_error: str | None = None
    full_replay: bool = False
    missed: set[int | None] = field(default_factory=set[int | None])
    _num_failures: int = 0
    _current: tuple[TrackerCall, float] | None = None  # the running call, and its start

    def __post_init__(self) -> None:
        self._queue: SimpleQueue[TrackerCall | None] = SimpleQueue()
        self._started: Future[str | None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def wait_for_start(self) -> str | None:
        """Return the id that the tracker gave the run.

        Raises the RlctlError of its `start`, an RlctlError for any other exception, and
        ResourceError after `start_s` seconds.
        """
        limit, mode = self.timeouts.start_s, f"trainer.tracking.modes.{self.name}"
        alternative = f"or set {mode} to a mode that needs no network"
        hint = f"remove {self.name} from trainer.logger, {alternative}"
        if not wait([self._started], limit).done:
            self._disable("it did not start")
            late = f"did not start within {limit:g} s (trainer.tracking.start_s)"
            raise ResourceError(f"logger {self.name} {late}", hint=hint)
        error = self._started.exception()
        if isinstance(error, Exception) and not isinstance(error, RlctlError):
            reason = f"failed to start: {type(error).__name__}: {error}"
            raise RlctlError(f"logger {self.name} {reason}", hint=hint) from error
        return self._started.result()

    def send(self, call: TrackerCall) -> None:
        """Queue a call without waiting; disable the tracker if it hangs or its queue is full."""
        self._check_time()
        size = self.timeouts.queue_size
        if self.disabled_reason is None and self._queue.qsize() >= size:
            self._disable(f"{size} calls are waiting (trainer.tracking.queue_size)")
        if self.disabled_reason is None:
            self._queue.put(call)
        else:
            self.missed.add(call.step)

    def close(self, state: str) -> None:
        """Queue `finish(state)` as the last call."""
        if self.disabled_reason is None:
            self._queue.put(TrackerCall("finish", None, (state,)))
            self._queue.put(None)

    def wait_for_end(self, deadline: float) -> None:
        """Wait for the delivery of all calls until `deadline` (`time.monotonic`); then give up."""
        while self._has_started and self.disabled_reason is None and self._thread.is_alive():
            self._thread.join(_POLL_S)
            self._check_time(deadline)
        if self._has_started and not self.is_stuck:
            self._thread.join(_EXIT_GRACE_S)  # the thread still counts what it missed

    @property
    def is_stuck(self) -> bool:
        """True if the tracker was disabled during a call that has not returned."""
        is_off = self.disabled_reason is not None
        return is_off and self._current is not None and self._thread.is_alive()

    @property
    def delivered_everything(self) -> bool:
        """True if the tracker has ended and every call was delivered."""
        has_ended = self._has_started and not self._thread.is_alive()
        return has_ended and self.disabled_reason is None and not self.missed

    def shortfall(self) -> dict[str, Any]:
        """Return the fields of an event: the cause, and the missed steps as (first, last)."""
        ranges: list[tuple[int, int]] = []
        for step in sorted(step for step in self.missed.copy() if step is not None):
            first = ranges.pop()[0] if ranges and ranges[-1][1] == step - 1 else step
            ranges.append((first, step))
        why = self.disabled_reason or self.last_error
        return {"tracker": self.name, "why": why, "steps": ranges}

    @property
    def _has_started(self) -> bool:
        return self._started.done() and self._started.exception() is None

    def _check_time(self, deadline: float = math.inf) -> None:
        """Disable the tracker if a call takes too long, or the thread runs after `deadline`."""
        now, current, limits = time.monotonic(), self._current, self.timeouts
        if self.disabled_reason is None and current and now - current[1] >= limits.call_s:
            limit = f"{limits.call_s:g} s (trainer.tracking.call_s)"
            self._disable(f"{current[0].name} took longer than {limit}")
        elif self.disabled_reason is None and now > deadline and self._thread.is_alive():
            limit = f"{limits.finish_s:g} s after the end of the run (trainer.tracking.finish_s)"
            self._disable(f"it did not finish within {limit}")

    def _disable(self, reason: str) -> None:
        """Accept no more calls; count the running and the queued ones as missed."""
        self.disabled_reason = reason
        if (current := self._current) is not None:
            self.missed.add(current[0].step)
        with contextlib.suppress(Empty):
            while True:
                if (call := self._queue.get_nowait()) is not None:
                    self.missed.add(call.step)
        self._queue.put(None)  # ends a thread that waits for a call

    def _run(self) -> None:
        try:
            run_id = self.tracker.start(replace(self.run, resume_step=max(0, self.first - 1)))
        except BaseException as error:  # `wait_for_start` raises it in the run's thread
            self._started.set_exception(error)
            return
        self.full_replay = run_id is not None and run_id != self.run.trackers.get(self.name)
        self._started.set_result(run_id)
        wanted = {step for step in self.steps if self.full_replay or step >= self.first}
        self.missed.update(wanted)  # until they are replayed
        unrecorded = wanted.copy()
        try:
            for step, calls in replay(self.run, wanted):
                if self.disabled_reason is not None:
                    return
                self.missed.discard(step)
                unrecorded.discard(step)
                for call in calls:
                    self._apply(call)
        except OSError as error:
            self._disable(f"the run's record cannot be read: {error}")
            return
        self.missed -= unrecorded  # such as step 0 of a run that was not validated before it
        while (call := self._queue.get()) is not None:
            self._apply(call)

    def _apply(self, call: TrackerCall) -> None:
        if self.disabled_reason is not None:
            self.missed.add(call.step)
            return
        self._current = (call, time.monotonic())
        try:
            call.apply(self.tracker)
            self._current = None
        except Exception as error:  # a failing tracker must not stop the run
            self._current = None
            self._num_failures += 1
            self.last_error = f"{call.name}: {type(error).__name__}: {error}"
            self.missed.add(call.step)
            if self._num_failures >= MAX_FAILURES:
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
