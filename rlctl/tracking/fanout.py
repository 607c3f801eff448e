"""All trackers of a run behind one interface.

The run's own record and the console are called directly; every other tracker has its own thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rlctl.monitoring.alarms import EVENT, OVER, Alarms
from rlctl.tracking.async_tracker import (
    MAX_FAILURES,
    AsyncTracker,
    TrackerTimeouts,
    force_exit_after_main,
)
from rlctl.tracking.history import (
    DELIVERED,
    MISSED,
    TrackerCall,
    log_call,
    missing_steps,
    sample_call,
)
from rlctl.tracking.loggers import make_tracker
from rlctl.tracking.tracker import Event, RunInfo, Sample, ShowsPhases, Tracker

RECORD = "jsonl"  # every run has this tracker: its files are the source of truth

log = logging.getLogger(__name__)


@dataclass
class Trackers:
    """Fan-out to all trackers of a run.

    Errors from `start` propagate: they occur before training. Later errors never stop the run: a
    tracker that fails `MAX_FAILURES` times, hangs or lags is disabled with one warning, and `rlctl
    runs sync` can send the steps that it missed. The record is never disabled: while it cannot be
    written (a full disk), it keeps its rows in memory and retries at the next step.
    """

    trackers: Mapping[str, Tracker]
    event: Event
    timeouts: TrackerTimeouts
    alarms: Alarms | None = None
    run: RunInfo | None = None  # from `start` on, like `threaded`
    threaded: dict[str, AsyncTracker] = field(default_factory=dict[str, AsyncTracker])
    num_non_finite: Counter[str] = field(default_factory=Counter[str])
    _num_failures: Counter[str] = field(default_factory=Counter[str])
    _warned: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.direct = {
            name: tracker
            for name, tracker in self.trackers.items()
            if name == RECORD or isinstance(tracker, ShowsPhases)
        }

    @classmethod
    def load(
        cls,
        names: Sequence[str],
        event: Event,
        timeouts: TrackerTimeouts,
        alarms: Alarms | None = None,
        params: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Self:
        """Build the trackers of these entry points, the record first; `params` are their settings.

        Raises ConfigError for unknown names or settings, MissingExtraError for missing packages.
        """
        names = list(dict.fromkeys([RECORD, *names]))
        trackers = {name: make_tracker(name, params or {}) for name in names}
        return cls(trackers, event, timeouts, alarms)

    def start(self, run: RunInfo) -> dict[str, str]:
        """Start the record and, in parallel, the threaded trackers; return run ids by logger.

        A resumed run's threaded trackers receive the recorded steps that they may lack.
        """
        self.run = run
        if RECORD in self.direct:
            self.direct[RECORD].start(run)
        past = range(run.resume_step + 1) if run.resume_step else range(0)
        with contextlib.redirect_stdout(sys.stderr):  # SDKs print banners; stdout is for data
            for name in [name for name in self.trackers if name not in self.direct]:
                first = min(missing_steps(run.folder, name, past), default=len(past)) if past else 0
                tracker = self.trackers[name]
                self.threaded[name] = AsyncTracker(name, tracker, self.timeouts, run, past, first)
            ids = {name: tracker.wait_for_start() for name, tracker in self.threaded.items()}
        return {name: run_id for name, run_id in ids.items() if run_id is not None}

    def begin(self) -> None:
        """Start the trackers that show phases, after the startup of the run."""
        for name in [name for name in self.direct if name != RECORD]:
            self._call_direct(TrackerCall("start", None, (self.run,)), name)

    def phase(self, name: str) -> None:
        """Report the phase that begins to the trackers that show phases."""
        self._call_direct(TrackerCall("phase", None, (name,)))

    def episodes(self, states: Mapping[str, int]) -> None:
        """Report the number of episodes by state to the trackers that show it."""
        self._call_direct(TrackerCall("episodes", None, (states,)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; threaded trackers receive the finite ones.

        The first NaN or infinity of each metric is recorded as an event. Raises alarms.
        """
        self._call_direct(TrackerCall("log", step, (step, metrics)))
        non_finite = [name for name, value in metrics.items() if not math.isfinite(value)]
        if first := sorted(set(non_finite) - set(self.num_non_finite)):
            self._record_event("non_finite", step=step, metrics=first)
        self.num_non_finite.update(non_finite)
        self._send(log_call(step, metrics))
        for alarm in self.alarms.add({**metrics, "step": step}) if self.alarms else ():
            fields = asdict(alarm)
            del fields["over"]
            self._record_event(OVER if alarm.over else EVENT, **fields)
            call = TrackerCall("alarm", None, (alarm,))
            self._call_direct(call)
            self._send(call)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Record all validation samples of a step; send the selected few to threaded trackers."""
        self._call_direct(TrackerCall("generations", step, (step, samples)))
        if self.run and (selected := self.run.select_samples(samples)):
            self._send(sample_call(step, selected))

    def finish(self, state: str, exit_code: int | None = None) -> None:
        """Close all trackers, and wait for them at most `finish_s` seconds.

        If `exit_code` is given and a tracker is stuck, the process exits with this code as soon as
        its main thread ends.
        """
        if self.num_non_finite:
            self._record_event("non_finite_total", metrics=dict(self.num_non_finite))
        self._call_direct(TrackerCall("finish", None, (state,)))
        deadline = time.monotonic() + self.timeouts.finish_s
        threaded = self.threaded.values()
        with contextlib.redirect_stdout(sys.stderr):
            for tracker in threaded:
                tracker.close(state)
            for tracker in threaded:
                tracker.wait_for_end(deadline)
        self._warn_disabled()
        if exit_code is not None and any(tracker.is_stuck for tracker in threaded):
            force_exit_after_main(exit_code)
        if delivered := [tracker.name for tracker in threaded if tracker.delivered_everything]:
            self._record_event(DELIVERED, trackers=delivered)
        for tracker in threaded:
            if tracker.missed:
                self._record_event(MISSED, **tracker.shortfall())

    def _send(self, call: TrackerCall) -> None:
        for tracker in self.threaded.values():
            tracker.send(call)
        self._warn_disabled()

    def _warn_disabled(self) -> None:
        """Warn once per disabled tracker."""
        for name, tracker in self.threaded.items():
            if tracker.disabled_reason is not None and name not in self._warned:
                run = self.run.name if self.run else "RUN"
                hint = f"; `rlctl runs sync {run} --logger {name}` sends the missed steps later"
                self._report_disabled(tracker.shortfall(), hint)

    def _report_disabled(self, shortfall: Mapping[str, Any], hint: str = "") -> None:
        name, reason = shortfall["tracker"], shortfall["why"]
        self._warned.add(name)
        log.warning("logger %s is disabled: %s%s", name, reason, hint)
        self._record_event("tracker_off", **shortfall)

    def _call_direct(self, call: TrackerCall, only: str | None = None) -> None:
        """Call the record and the console in this thread, or one of them."""
        for name, tracker in list(self.direct.items()):
            try:
                if only in (None, name):
                    call.apply(tracker)
            except Exception as error:  # the console may fail, and the record retries
                self._count_failure(name, f"{call.name}: {type(error).__name__}: {error}")

    def _count_failure(self, name: str, reason: str) -> None:
        self._num_failures[name] += 1
        if name != RECORD and self._num_failures[name] >= MAX_FAILURES:
            del self.direct[name]
            reason = f"{MAX_FAILURES} failures, the last in {reason}"
            self._report_disabled({"tracker": name, "why": reason, "steps": ()})
        elif name == RECORD and name not in self._warned:
            self._warned.add(name)
            log.warning(
                "cannot write the run's record; its rows stay in memory and each step tries again: "
                "%s",
                reason,
            )

    def _record_event(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # the disk of the record may be full
            self.event(kind, **fields)
