"""Delivery of calls to one tracker through a thread, and replay of recorded steps."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rlctl.code_places import plugin_packages, users_place
from rlctl.errors import ConfigError, ResourceError, RlctlError, Terminated, TimeUp
from rlctl.log import warn_once
from rlctl.tracking.delivery import Call, Delivery, TrackerTimeouts, log_call, sample_calls
from rlctl.tracking.json_lines import read_lines
from rlctl.tracking.jsonl import METRICS_FILE, generations_file, metric_rows, read_generations
from rlctl.tracking.tracker import ReadsBack, RunInfo, Tracker

# Kinds of events: trackers that received everything that an attempt sent, a tracker that missed
# steps, and a tracker that `rlctl runs sync` updated.
DELIVERED = "trackers_told"
MISSED = "tracker_missed"
SYNCED = "tracker_synced"
_LAST = ("failure", "finish")
_EXIT_GRACE_S = 5.0  # for other threads and exit handlers to complete
_POLL_S = 0.05


@dataclass(eq=False)
class ThreadedDelivery(Delivery):
    """Calls of one tracker, made by a daemon thread: a slow tracker never blocks the run.

    The thread starts the tracker, replays the recorded `steps` from `first` on, and makes the
    queued calls; another thread makes those of the methods in the tracker's `apart`. If the tracker
    gives the run another id than the one in `run.trackers`, all `steps` are replayed
    (`full_replay`). Replayed steps that the server has are not sent; `sent` has the others.
    `num_received` is the number of recorded steps that the server has at the end, None if the
    tracker cannot read it back.
    """

    timeouts: TrackerTimeouts
    run: RunInfo
    steps: Collection[int] = ()
    first: int = 0
    full_replay: bool = field(default=False, init=False)
    sent: set[int] = field(default_factory=set[int], init=False)
    num_received: int | None = field(default=None, init=False)
    is_late: bool = field(default=False, init=False)  # disabled because it did not start
    _is_finished: bool = field(default=False, init=False)  # `finish` returned, and is confirmed
    _current: tuple[str, float] | None = field(default=None, init=False)  # method, and its start

    def __post_init__(self) -> None:
        self.apart = None
        if getattr(self.tracker, "apart", ()):
            from rlctl.tracking.apart import Apart

            self.apart = Apart(self.name, self.tracker, self.timeouts.call_s)
            self.apart.undelivered = self.undelivered
        self._queue: SimpleQueue[Call] = SimpleQueue()
        self._started: Future[str | None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def wait_for_start(self) -> str | None:
        """Return the id that the tracker gave the run.

        Raises the RlctlError of its `start`, an RlctlError for any other exception, and
        ResourceError after `start_s` seconds. A tracker whose server was not requested (its
        attribute `requested` is false) is disabled instead.
        """
        error = self._start_error()
        if error is None:
            return self._started.result()
        if getattr(self.tracker, "requested", True) or isinstance(error, Terminated | TimeUp):
            raise error
        self.is_late = True
        self.disable(error.problems[0].message)
        return None

    def _start_error(self) -> RlctlError | None:
        limit = self.timeouts.start_s
        mode = f"set trainer.tracking.modes.{self.name} to a mode"
        hint = f"remove {self.name} from trainer.logger, or {mode} that needs no network"
        try:
            error = self._started.exception(limit)
        except TimeoutError:
            late = f"did not start within {limit:g} s (trainer.tracking.start_s)"
            self.disable(f"it {late}")
            return ResourceError(f"logger {self.name} {late}", hint=hint)
        if error is None or isinstance(error, RlctlError):
            return error
        if not isinstance(error, Exception):
            raise error
        message = f"logger {self.name} failed to start: {type(error).__name__}: {error}"
        place = users_place(error, plugin_packages)
        kind = ConfigError
        if place is None:
            kind = RlctlError
        found = kind(message, where=place, hint=hint)
        found.__cause__ = error
        return found

    def send(self, call: Call) -> None:
        """Queue a call without waiting; disable the tracker if it hangs or its queue is full.

        A full queue accepts `failure` and `finish`, the last calls.
        """
        self._check_time()
        size = self.timeouts.queue_size
        if call.method not in _LAST and self._queue.qsize() >= size:
            self.disable(f"{size} calls are waiting (trainer.tracking.queue_size)")
        self.undelivered.add((call.step, call.method))
        if self.disabled_reason is None:
            self._queue.put(call)

    def wait_for_end(self, deadline: float) -> None:
        """Wait for the delivery of all calls until `deadline` (`time.monotonic`); then give up."""
        while self.disabled_reason is None and self._thread.is_alive():
            self._thread.join(_POLL_S)
            self._check_time(deadline)

    @property
    def is_complete(self) -> bool:
        """True if the tracker has all that was sent, as far as it can be known."""
        return self._is_finished and self.off is None and not self.undelivered

    @property
    def offline(self) -> str | None:
        """Reason why the tracker writes offline files; None if it does not."""
        if getattr(self.tracker, "mode", None) != "offline":
            return None
        return getattr(self.tracker, "reason", "")

    @property
    def off(self) -> str | None:
        """Reason why some or all calls are no longer made."""
        if self.disabled_reason or self.apart is None:
            return self.disabled_reason
        return self.apart.disabled_reason

    def shortfall(self) -> dict[str, Any]:
        """Return the fields of an event, with the `first` step that may be missed.

        `exact`: no other steps are missed than those in `steps`. Otherwise the tracker may have
        lost any step, because SDKs keep steps in memory after their calls return.
        """
        is_exact = self._is_finished and self.off is None
        first = self.first
        if self.full_replay:
            first = 0
        why = self.off or self.last_error
        fields = {"why": why, "exact": is_exact, "first": first}
        if self.offline is not None:
            fields["offline"] = [self.name]
        return {**super().shortfall(), **fields}

    @property
    def has_started(self) -> bool:
        """True if the tracker's `start` has returned."""
        return self._started.done() and self._started.exception() is None

    @property
    def is_stuck(self) -> bool:
        """True if the SDK may wait for its server when the process exits.

        So it is if the tracker did not start, its `finish` did not return, or a call has not.
        """
        has_finished = (None, "finish") not in self.undelivered and not self._thread.is_alive()
        is_stuck = self.is_late or (self.has_started and not has_finished)
        return is_stuck or (self.apart is not None and self.apart.is_stuck)

    def _check_time(self, deadline: float = math.inf) -> None:
        """Disable the tracker if a call takes too long, or the thread runs after `deadline`."""
        now = time.monotonic()
        current = self._current
        limits = self.timeouts
        if self.apart is not None:
            self.apart.check_time()
        if current and now - current[1] >= limits.call_s:
            limit = f"{limits.call_s:g} s (trainer.tracking.call_s)"
            self.disable(f"{current[0]} took longer than {limit}")
        elif now > deadline and self._thread.is_alive():
            limit = f"{limits.finish_s:g} s after the end of the run (trainer.tracking.finish_s)"
            self.disable(f"it did not finish within {limit}")

    def _run(self) -> None:
        try:
            run_id = self.tracker.start(replace(self.run, resume_step=max(0, self.first - 1)))
        except BaseException as error:  # `wait_for_start` raises it in the run's thread
            self._started.set_exception(error)
            return
        self.full_replay = run_id is not None and run_id != self.run.trackers.get(self.name)
        steps = {step for step in self.steps if self.full_replay or step >= self.first}
        self.undelivered |= {(step, "log") for step in steps}
        self._started.set_result(run_id)
        try:
            queued = iter(self._queue.get, None)  # endless: waits for the next call
            for call in chain(self._replay(steps), queued):
                self._make(call)
                if self.disabled_reason is not None:
                    return
                if call.method == "finish":
                    self._confirm()
                    return
        except OSError as error:
            self.disable(f"the run's record cannot be read: {error}")

    def _make(self, call: Call) -> None:
        if self.apart is not None and call.method in getattr(self.tracker, "apart", ()):
            self.apart.put(call)
            return
        if self.apart is not None and call.method == "finish":
            self.apart.drain(self.timeouts.finish_s / 2)
        self._current = call.method, time.monotonic()
        super().send(call)
        self._current = None

    def _replay(self, steps: Collection[int]) -> Iterator[Call]:
        """Yield the calls of recorded steps, without what the server has."""
        calls = replay(self.run, steps)
        if steps and isinstance(self.tracker, ReadsBack):
            from rlctl.tracking.read_back import without_received

            calls = without_received(self, calls)
        for call in calls:
            if call.step is not None:
                self.sent.add(call.step)
            yield call

    def _confirm(self) -> None:
        """Note whether the tracker has finished, and which steps its server lacks."""
        if isinstance(self.tracker, ReadsBack):
            from rlctl.tracking.read_back import confirm

            self._is_finished = confirm(self)
        else:
            self._is_finished = (None, "finish") not in self.undelivered


def start_threads(
    trackers: Mapping[str, Tracker], timeouts: TrackerTimeouts, run: RunInfo
) -> dict[str, ThreadedDelivery]:
    """Start a thread for each tracker; those of a resumed run get the steps that they may lack."""
    past: list[int] = []
    if run.resume_step:
        recorded = metric_rows(run.folder / METRICS_FILE)
        past = [int(row["step"]) for row in recorded if row["step"] <= run.resume_step]
    threaded: dict[str, ThreadedDelivery] = {}
    for name, tracker in trackers.items():
        first = 0
        if past:
            first = first_missing_step(run.folder, name, run.resume_step + 1)
        threaded[name] = ThreadedDelivery(name, tracker, timeouts, run, past, first)
    return threaded


def force_exit_after_main(exit_code: int, trackers: Sequence[Tracker] = ()) -> None:
    """Exit the process `_EXIT_GRACE_S` seconds after its main thread ends.

    SDKs of trackers wait at exit, without a limit, for the call that is stuck. Their processes are
    ended first (`abandon`).
    """

    def force_exit() -> None:
        threading.main_thread().join()
        time.sleep(_EXIT_GRACE_S)
        abandon(trackers)
        os._exit(exit_code)

    threading.Thread(target=force_exit, name="force exit", daemon=True).start()


def abandon(trackers: Sequence[Tracker]) -> None:
    """End what the SDKs of trackers that are stuck do in other processes."""
    for tracker in trackers:
        with suppress(Exception):
            getattr(tracker, "abandon", lambda: None)()


def replay(run: RunInfo, steps: Collection[int]) -> Iterator[Call]:
    """Yield the calls of each recorded member of `steps`, oldest first.

    Samples that cannot be read are left out, with one warning for each file.
    """
    if not steps:
        return
    from rlctl.tracking.recorded_alarms import recorded_alarms

    alarms = recorded_alarms(run.folder)
    for row in metric_rows(run.folder / METRICS_FILE):
        if (step := int(row.pop("step"))) in steps:
            try:
                samples = read_generations(generations_file(run.folder, step))
                yield from sample_calls(run, step, samples)
            except (ConfigError, OSError) as error:
                warn_once(f"the samples of step {step} are not replayed: {error}")
            yield log_call(step, row)
            yield from (Call("alarm", (alarm,), step) for alarm in alarms.get(step, ()))


def was_offline(run: Path, logger: str) -> bool:
    """Return True if the last attempt or sync of a run left the steps of a logger in files."""
    is_offline = False
    for event in read_lines(run / "events.jsonl"):
        if event.get("kind") in (DELIVERED, SYNCED, MISSED):
            names = event.get("trackers", (event.get("tracker"),))
            if logger in names:
                is_offline = logger in event.get("offline", ())
    return is_offline


def first_missing_step(run: Path, logger: str, end: int) -> int:
    """Return the first step that a logger may lack, from a run's events; `end` if it has all.

    A complete attempt records what each logger missed. SDKs buffer in memory, so after an attempt
    that was killed, whose logger was disabled, or whose `finish` failed, the logger counts as
    having none of its steps. With a broken line among the events it counts as having no step.
    """
    first = 0
    broken: list[int] = []
    for event in read_lines(run / "events.jsonl", lambda _, lines: broken.extend(lines)):
        kind = event.get("kind")
        names = event.get("trackers", (event.get("tracker"),))
        if kind == "resume":
            resumed = 0
            if event["step"]:
                resumed = event["step"] + 1
            first = min(first, resumed)
        elif kind in (DELIVERED, SYNCED) and logger in names:
            first = end
        elif kind == MISSED and logger in names:
            is_exact = event.get("exact", False)
            known = min((begin for begin, _ in event["steps"]), default=end)
            if not is_exact:
                known = min(first, event.get("first", 0))
            first = known
    if broken:
        return 0
    return min(first, end)
