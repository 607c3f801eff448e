"""All trackers of a run as one: the record is written at once, the console is told at once, every other tracker has its own thread."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

from rlctl.errors import ConfigError, MissingExtraError, RlctlError
from rlctl.monitoring.alarms import EVENT, OVER, Alarm, Alarms, ShowsAlarms
from rlctl.plugins import load, packages
from rlctl.tracking.async_tracker import (
    MAX_FAILURES,
    AsyncTracker,
    TrackerCall,
    TrackerTimeouts,
    leave_in_any_case,
)
from rlctl.tracking.history import MISSED, TOLD, history, log_call, missing_steps, sample_call
from rlctl.tracking.tracker import Event, Preflight, RunInfo, Sample, ShowsPhases, Tracker

RECORD = "jsonl"  # the tracker that every run has: what it writes is the truth, and no other is waited for


def preflight(name: str, mode: str | None) -> str:
    """What the logger would do in a run: its mode in a few words, or nothing where it has none.

    Errors: as `rlctl.plugins.load`; ConfigError for a mode of a logger without modes; what the logger itself finds wrong.
    """
    tracker = load("loggers", name)
    if isinstance(tracker, Preflight):
        return tracker.preflight(mode)
    if mode is not None:
        raise ConfigError(
            f"logger {name} has no modes",
            where=f"trainer.tracking.modes.{name}={mode}",
            hint="leave that out",
        )
    return ""


@dataclass(frozen=True)
class LoggerState:
    """A logger and the package that offers it: what it would do here and now (`message`), or what would make it work (`remedy`)."""

    name: str
    package: str
    state: Literal["ready", "not installed", "would not start"]
    message: str
    remedy: str | None = None


def examine() -> list[LoggerState]:
    """Every logger that an installed package offers, by name."""
    return [_examined(name, package) for name, package in packages("loggers").items()]


def _examined(name: str, package: str) -> LoggerState:
    try:
        return LoggerState(name, package, "ready", preflight(name, None))
    except RlctlError as error:
        problem = error.problems[0]
        state = "not installed" if isinstance(error, MissingExtraError) else "would not start"
        return LoggerState(name, package, state, problem.message, problem.hint)


class Trackers:
    """What is wrong at the start passes, for it is met before training. Later errors never stop the run: a tracker that fails
    `MAX_FAILURES` times, hangs or lags is switched off, with one warning; `rlctl runs sync` sends later what it missed.

    The record is never switched off. While it cannot be written (a full disk), it keeps its rows and tries again at the next step.
    """

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        event: Event,
        patience: TrackerTimeouts,
        alarms: Alarms | None = None,
    ) -> None:
        self.patience = patience
        self.direct = {
            name: each
            for name, each in trackers.items()
            if name == RECORD or isinstance(each, ShowsPhases)
        }
        self.mirrors = {
            name: AsyncTracker(name, each, patience)
            for name, each in trackers.items()
            if name not in self.direct
        }
        self.alarms = alarms
        self.run: RunInfo | None = None
        self.non_finite: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._told: set[str] = set()
        self._event = event

    @classmethod
    def load(
        cls,
        names: Sequence[str],
        event: Event,
        patience: TrackerTimeouts,
        alarms: Alarms | None = None,
    ) -> Self:
        """The trackers of these entry points (group `rlctl.loggers`), and the record first in any case.

        Errors: NotFoundError for a name that no package offers, MissingExtraError when its package is not installed.
        """
        return cls(
            {name: load("loggers", name)() for name in dict.fromkeys([RECORD, *names])},
            event,
            patience,
            alarms,
        )

    def start(self, run: RunInfo) -> dict[str, str]:
        """Start the record and the mirrors, these side by side. Returns the ids that they gave the run, by logger, for its record."""
        self.run = run
        for tracker in self.direct.values():
            if not isinstance(tracker, ShowsPhases):
                tracker.start(run)
        with contextlib.redirect_stdout(sys.stderr):  # SDKs greet on stdout, which belongs to data
            for mirror in self.mirrors.values():
                _start(mirror, run)
            ids = {name: mirror.wait_for_start() for name, mirror in self.mirrors.items()}
        return {name: given for name, given in ids.items() if given is not None}

    def begin(self) -> None:
        """Starting up is over: what shows the run shows its steps from now on."""
        run = self.run
        assert run is not None, "start comes first"
        self._tell(
            "start",
            lambda tracker: tracker.start(run) if isinstance(tracker, ShowsPhases) else None,
        )

    def phase(self, name: str) -> None:
        self._tell(
            "phase",
            lambda tracker: tracker.phase(name) if isinstance(tracker, ShowsPhases) else None,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step; mirrors get the finite ones. The first time that a metric is NaN or infinite is an event."""
        self._tell("log", lambda tracker: tracker.log(step, metrics))
        strange = [name for name, value in metrics.items() if not math.isfinite(value)]
        if first := sorted(set(strange) - set(self.non_finite)):
            self._record_event("non_finite", step=step, metrics=first)
        self.non_finite.update(strange)
        self._send(log_call(step, metrics))
        self._ring(step, metrics)

    def _ring(self, step: int, metrics: Mapping[str, float]) -> None:
        for alarm in self.alarms.see({**metrics, "step": step}) if self.alarms else ():
            fields = {
                name: value for name, value in dataclasses.asdict(alarm).items() if name != "over"
            }
            self._record_event(OVER if alarm.over else EVENT, **fields)
            show = partial(_show_alarm, alarm=alarm)
            self._tell("alarm", show)
            self._send(TrackerCall("alarm", None, show))

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Validation answers: all of them into the run's own record, the few that the recipe wants shown to every other tracker."""
        shown = self.run.shown(samples) if self.run else []
        self._tell("generations", lambda tracker: tracker.generations(step, samples))
        if shown:
            self._send(sample_call(step, shown))

    def finish(self, state: str, exit_code: int | None = None) -> None:
        """Tell all that the run is over, and wait for them no longer than `finish_s`.

        With an `exit_code` the process leaves with it also where a tracker that hangs would keep it from ending.
        """
        if self.non_finite:
            self._record_event("non_finite_total", metrics=dict(self.non_finite))
        self._tell("finish", lambda tracker: tracker.finish(state))
        deadline = time.monotonic() + self.patience.finish_s
        with contextlib.redirect_stdout(sys.stderr):
            for mirror in self.mirrors.values():
                mirror.end(TrackerCall("finish", None, lambda tracker: tracker.finish(state)))
            for mirror in self.mirrors.values():
                mirror.wait_for_end(deadline)
        self._report()
        if exit_code is not None and any(mirror.hangs for mirror in self.mirrors.values()):
            leave_in_any_case(exit_code)
        if told := [name for name, mirror in self.mirrors.items() if mirror.took_everything]:
            self._record_event(TOLD, trackers=told)
        for name, mirror in self.mirrors.items():
            if mirror.missed:
                self._record_event(
                    MISSED,
                    tracker=name,
                    why=mirror.off or mirror.last_error,
                    steps=mirror.missed_steps(),
                )

    def _send(self, call: TrackerCall) -> None:
        for mirror in self.mirrors.values():
            mirror.send(call)
        self._report()

    def _report(self) -> None:
        """Say once of every mirror that has gone that it has."""
        for name, mirror in self.mirrors.items():
            if mirror.off is not None and name not in self._told:
                self._switched_off(name, mirror.off, mirror.missed_steps())

    def _switched_off(self, name: str, why: str, missed: Sequence[Sequence[int]]) -> None:
        self._told.add(name)
        later = (
            f"; `rlctl runs sync {self.run.name} --logger {name}` sends later what it misses"
            if self.run and name in self.mirrors
            else ""
        )
        _warn(f"logger {name} is switched off: {why}{later}")
        self._record_event("tracker_off", tracker=name, why=why, steps=missed)

    def _tell(self, what: str, call: Callable[[Tracker], object]) -> None:
        """Tell the record and the console, in this thread."""
        for name, tracker in list(self.direct.items()):
            try:
                call(tracker)
            except (
                Exception
            ) as error:  # the run goes on without a line on the terminal, and its record catches up
                self._failed(name, f"{what}: {type(error).__name__}: {error}")

    def _failed(self, name: str, why: str) -> None:
        self._failures[name] += 1
        if name == RECORD:
            if name not in self._told:
                self._told.add(name)
                _warn(
                    f"the run's record cannot be written; what it misses waits in memory and is tried again each step: {why}"
                )
        elif self._failures[name] >= MAX_FAILURES:
            del self.direct[name]
            self._switched_off(name, f"{MAX_FAILURES} failures, the last in {why}", ())

    def _record_event(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(
            OSError
        ):  # the disk that the record is on may be the one that is full
            self._event(kind, **fields)


def _start(mirror: AsyncTracker, run: RunInfo) -> None:
    """A tracker goes on from the last step that it is known to have, and is told first what follows until `run.resume_step`."""
    past = range(run.resume_step + 1) if run.resume_step else range(0)
    first = min(missing_steps(run.folder, mirror.name, past), default=len(past)) if past else 0
    known = replace(run, resume_step=max(0, first - 1))
    mirror.start(known, lambda anew: history(run, past if anew else past[first:]))


def _show_alarm(tracker: Tracker, alarm: Alarm) -> None:
    if isinstance(tracker, ShowsAlarms):
        tracker.alarm(alarm)


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"warning: {text}", file=sys.stderr)
