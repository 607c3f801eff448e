"""All trackers of a run behind one interface.

The run's own record and the console are called directly; every other tracker has its own thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from rlctl.monitoring.alarms import EVENT, OVER, Alarm, Alarms, ShowsAlarms
from rlctl.tracking.async_tracker import (
    MAX_FAILURES,
    AsyncTracker,
    TrackerCall,
    TrackerTimeouts,
    force_exit_after_main,
)
from rlctl.tracking.history import (
    DELIVERED,
    MISSED,
    history,
    log_call,
    missing_steps,
    sample_call,
)
from rlctl.tracking.loggers import make_tracker
from rlctl.tracking.tracker import (
    Event,
    RunInfo,
    Sample,
    ShowsEpisodes,
    ShowsPhases,
    Tracker,
)

RECORD = "jsonl"  # every run has this tracker: its files are the source of truth

log = logging.getLogger(__name__)


class Trackers:
    """Fan-out to all trackers of a run.

    Errors from `start` propagate: they occur before training. Later errors never stop the run: a
    tracker that fails `MAX_FAILURES` times, hangs or lags is disabled with one warning, and `rlctl
    runs sync` can send the steps that it missed. The record is never disabled: while it cannot be
    written (a full disk), it keeps its rows in memory and retries at the next step.
    """

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        event: Event,
        timeouts: TrackerTimeouts,
        alarms: Alarms | None = None,
    ) -> None:
        self.timeouts = timeouts
        self.direct = {
            name: each
            for name, each in trackers.items()
            if name == RECORD or isinstance(each, ShowsPhases)
        }
        self.threaded = {
            name: AsyncTracker(name, each, timeouts)
            for name, each in trackers.items()
            if name not in self.direct
        }
        self.alarms = alarms
        self.run: RunInfo | None = None
        self.num_non_finite: Counter[str] = Counter()
        self._num_failures: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._event = event

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
        return cls(
            {name: make_tracker(name, params or {}) for name in dict.fromkeys([RECORD, *names])},
            event,
            timeouts,
            alarms,
        )

    def start(self, run: RunInfo) -> dict[str, str]:
        """Start the record and, in parallel, the threaded trackers; return run ids by logger."""
        self.run = run
        for tracker in self.direct.values():
            if not isinstance(tracker, ShowsPhases):
                tracker.start(run)
        with contextlib.redirect_stdout(sys.stderr):  # SDKs print banners; stdout is for data
            for tracker in self.threaded.values():
                _start(tracker, run)
            ids = {name: tracker.wait_for_start() for name, tracker in self.threaded.items()}
        return {name: run_id for name, run_id in ids.items() if run_id is not None}

    def begin(self) -> None:
        """Start the trackers that show phases, after the startup of the run."""
        run = self.run
        assert run is not None, "start comes first"
        self._call_direct(
            "start",
            lambda tracker: tracker.start(run) if isinstance(tracker, ShowsPhases) else None,
        )

    def phase(self, name: str) -> None:
        """Report the phase that begins to the trackers that show phases."""
        self._call_direct(
            "phase",
            lambda tracker: tracker.phase(name) if isinstance(tracker, ShowsPhases) else None,
        )

    def episodes(self, states: Mapping[str, int]) -> None:
        """Report the number of episodes by state to the trackers that show it."""
        self._call_direct(
            "episodes",
            lambda tracker: (
                tracker.episodes(states) if isinstance(tracker, ShowsEpisodes) else None
            ),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; threaded trackers receive the finite ones.

        The first NaN or infinity of each metric is recorded as an event. Raises alarms.
        """
        self._call_direct("log", lambda tracker: tracker.log(step, metrics))
        non_finite = [name for name, value in metrics.items() if not math.isfinite(value)]
        if first := sorted(set(non_finite) - set(self.num_non_finite)):
            self._record_event("non_finite", step=step, metrics=first)
        self.num_non_finite.update(non_finite)
        self._send(log_call(step, metrics))
        self._report_alarms(step, metrics)

    def _report_alarms(self, step: int, metrics: Mapping[str, float]) -> None:
        for alarm in self.alarms.add({**metrics, "step": step}) if self.alarms else ():
            fields = {
                name: value for name, value in dataclasses.asdict(alarm).items() if name != "over"
            }
            self._record_event(OVER if alarm.over else EVENT, **fields)
            show = partial(_show_alarm, alarm=alarm)
            self._call_direct("alarm", show)
            self._send(TrackerCall("alarm", None, show))

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Record all validation samples of a step; send the selected few to threaded trackers."""
        selected = self.run.select_samples(samples) if self.run else []
        self._call_direct("generations", lambda tracker: tracker.generations(step, samples))
        if selected:
            self._send(sample_call(step, selected))

    def finish(self, state: str, exit_code: int | None = None) -> None:
        """Close all trackers, and wait for them at most `finish_s` seconds.

        If `exit_code` is given and a tracker is stuck, the process exits with this code as soon as
        its main thread ends.
        """
        if self.num_non_finite:
            self._record_event("non_finite_total", metrics=dict(self.num_non_finite))
        self._call_direct("finish", lambda tracker: tracker.finish(state))
        deadline = time.monotonic() + self.timeouts.finish_s
        with contextlib.redirect_stdout(sys.stderr):
            for tracker in self.threaded.values():
                tracker.close(TrackerCall("finish", None, lambda tracker: tracker.finish(state)))
            for tracker in self.threaded.values():
                tracker.wait_for_end(deadline)
        self._warn_disabled()
        if exit_code is not None and any(each.is_stuck for each in self.threaded.values()):
            force_exit_after_main(exit_code)
        self._record_deliveries()

    def _record_deliveries(self) -> None:
        delivered = [name for name, each in self.threaded.items() if each.delivered_everything]
        if delivered:
            self._record_event(DELIVERED, trackers=delivered)
        for name, tracker in self.threaded.items():
            if tracker.missed:
                self._record_event(
                    MISSED,
                    tracker=name,
                    why=tracker.disabled_reason or tracker.last_error,
                    steps=tracker.missed_ranges(),
                )

    def _send(self, call: TrackerCall) -> None:
        for tracker in self.threaded.values():
            tracker.send(call)
        self._warn_disabled()

    def _warn_disabled(self) -> None:
        """Warn once per disabled tracker."""
        for name, tracker in self.threaded.items():
            if tracker.disabled_reason is not None and name not in self._warned:
                self._report_disabled(name, tracker.disabled_reason, tracker.missed_ranges())

    def _report_disabled(self, name: str, reason: str, missed: Sequence[Sequence[int]]) -> None:
        self._warned.add(name)
        hint = (
            f"; `rlctl runs sync {self.run.name} --logger {name}` sends the missed steps later"
            if self.run and name in self.threaded
            else ""
        )
        log.warning("logger %s is disabled: %s%s", name, reason, hint)
        self._record_event("tracker_off", tracker=name, why=reason, steps=missed)

    def _call_direct(self, name: str, call: Callable[[Tracker], object]) -> None:
        """Call the record and the console in this thread."""
        for logger, tracker in list(self.direct.items()):
            try:
                call(tracker)
            except Exception as error:  # the console may fail, and the record retries
                self._count_failure(logger, f"{name}: {type(error).__name__}: {error}")

    def _count_failure(self, name: str, reason: str) -> None:
        self._num_failures[name] += 1
        if name == RECORD:
            if name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "cannot write the run's record; its rows stay in memory "
                    "and each step tries again: %s",
                    reason,
                )
        elif self._num_failures[name] >= MAX_FAILURES:
            del self.direct[name]
            self._report_disabled(name, f"{MAX_FAILURES} failures, the last in {reason}", ())

    def _record_event(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # the disk of the record may be full
            self._event(kind, **fields)


def _start(tracker: AsyncTracker, run: RunInfo) -> None:
    """Start a tracker after the last step that it has; replay the steps up to `run.resume_step`."""
    past = range(run.resume_step + 1) if run.resume_step else range(0)
    first = min(missing_steps(run.folder, tracker.name, past), default=len(past)) if past else 0
    known = replace(run, resume_step=max(0, first - 1))
    tracker.start(known, lambda full_replay: history(run, past if full_replay else past[first:]))


def _show_alarm(tracker: Tracker, alarm: Alarm) -> None:
    if isinstance(tracker, ShowsAlarms):
        tracker.alarm(alarm)
