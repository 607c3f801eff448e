"""What a tracker is, and the fan-out that sends every step to all of them and lets none of them stop a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from rlctl.tracking.alarms import EVENT, OVER, Alarms, ShowsAlarms

MAX_FAILURES = 3
RECORD = "jsonl"  # the tracker that every run has: what it writes is the truth


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may know of its run. `total_steps` is the last training step; `config` is the composed configuration as plain data.

    `trackers` maps a logger to the id that it gave the run in an earlier attempt; `resume_step` is the last step of the history that this
    attempt goes on from, 0 in a new run.
    """

    id: str
    project: str
    name: str
    folder: Path
    total_steps: int
    config: Mapping[str, Any]
    trackers: Mapping[str, str] = field(default_factory=dict)
    resume_step: int = 0


@dataclass(frozen=True)
class Sample:
    """One validation answer: `length` in response tokens, `finish` says why it ended, `components` are the parts of `score` by name."""

    prompt: str
    response: str
    ground_truth: Any
    score: float
    components: Mapping[str, float]
    length: int
    finish: str
    data_source: str

    @property
    def right(self) -> bool:
        """Whether it counts as a correct answer: its accuracy (the component `acc`, or else the score) is at least a half."""
        return self.components.get("acc", self.score) >= 0.5


class Tracker(Protocol):
    """Takes the record of a run, in this order: `start`, then `log` and `generations` with growing steps, then `finish`.

    Made without arguments. `log` gets every metric of a step, NaN and infinities included, and must not hold up the step for longer than it
    takes to write a line. `state` is the run's last: finished, failed or stopped; a run that fails early may `finish` before it starts.
    `start` returns the id under which a later attempt finds the same history (`RunInfo.trackers`), or None where there is no such thing.
    """

    def start(self, run: RunInfo) -> str | None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def generations(self, step: int, samples: Sequence[Sample]) -> None: ...

    def finish(self, state: str) -> None: ...


@runtime_checkable
class ShowsPhases(Protocol):
    """A tracker that also shows what the run is doing now. Phases before `start` are those of starting up."""

    def phase(self, name: str) -> None: ...


class Event(Protocol):
    """Where events go: `RunDir.event`."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


@dataclass
class Trackers:
    """All trackers of a run as one.

    An error in `start` passes, for it is met before training. Later errors never stop the run: after `MAX_FAILURES` a tracker is
    switched off, with one warning.
    """

    trackers: dict[str, Tracker]
    event: Event
    alarms: Alarms | None = None
    failures: dict[str, int] = field(default_factory=dict)
    non_finite: set[str] = field(default_factory=set)

    @classmethod
    def load(cls, names: Sequence[str], event: Event) -> Self:
        """The trackers of these entry points (group `rlctl.loggers`), and `jsonl` first in any case.

        Errors: NotFoundError for a name that no package offers, MissingExtraError when its package is not installed.
        """
        from rlctl.plugins import load

        return cls({name: load("loggers", name)() for name in dict.fromkeys([RECORD, *names])}, event)

    def start(self, run: RunInfo) -> dict[str, str]:
        """Start all of them. Returns the ids that they gave the run, by logger, for its record."""
        ids = {name: tracker.start(run) for name, tracker in self.trackers.items()}
        return {name: given for name, given in ids.items() if given is not None}

    def phase(self, name: str) -> None:
        self._send("phase", lambda tracker: tracker.phase(name) if isinstance(tracker, ShowsPhases) else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step. The first time that a metric is NaN or infinite is an event of the run."""
        strange = {name for name, value in metrics.items() if not math.isfinite(value)} - self.non_finite
        if strange:
            self.non_finite |= strange
            self.event("non_finite", step=step, metrics=sorted(strange))
        self._send("log", lambda tracker: tracker.log(step, metrics))
        self._ring(step, metrics)

    def _ring(self, step: int, metrics: Mapping[str, float]) -> None:
        for alarm in self.alarms.see({**metrics, "step": step}) if self.alarms else ():
            self.event(
                OVER if alarm.over else EVENT,
                step=step, name=alarm.name, value=alarm.value, limit=alarm.limit, message=alarm.message, hint=alarm.hint,
            )  # fmt: skip
            self._send("alarm", lambda tracker, alarm=alarm: tracker.alarm(alarm) if isinstance(tracker, ShowsAlarms) else None)

    def generations(self, step: int, samples: Sequence[Sample], shown: Sequence[Sample]) -> None:
        """Validation answers: all of them into the run's own record, the few that are `shown` to every other tracker."""
        record = self.trackers.get(RECORD)
        self._send("generations", lambda tracker: tracker.generations(step, samples if tracker is record else shown))

    def finish(self, state: str) -> None:
        self._send("finish", lambda tracker: tracker.finish(state))

    def _send(self, what: str, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # a mirror may break, the run goes on
                self._failed(name, f"{what}: {type(error).__name__}: {error}")

    def _failed(self, name: str, why: str) -> None:
        self.failures[name] = self.failures.get(name, 0) + 1
        if self.failures[name] < MAX_FAILURES:
            return
        del self.trackers[name]
        print(f"warning: logger {name} is switched off after {MAX_FAILURES} failures, the last in {why}", file=sys.stderr)
        self.event("tracker_off", tracker=name, failures=MAX_FAILURES, why=why)
