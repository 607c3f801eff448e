"""Delivery of calls to one tracker at once; `threaded` delivers them by a thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rlctl.errors import Terminated, TimeUp
from rlctl.tracking.tracker import RunInfo, Sample, Tracker

MAX_FAILURES = 3
_OPTIONAL = ("phase", "episodes", "alarm", "failure")  # methods that not every tracker has


@dataclass(frozen=True)
class TrackerTimeouts:
    """Limits of a tracker: queued calls, and seconds for the start, each call and the end."""

    queue_size: int
    start_s: float
    call_s: float
    finish_s: float


class Call(NamedTuple):
    """Call of a tracker's method, and the training step that it belongs to, if any."""

    method: str
    arguments: tuple[Any, ...]
    step: int | None = None


@dataclass(eq=False)
class Delivery:
    """Calls of one tracker, made in the caller's thread.

    `disabled_reason` is None while the tracker is enabled; `last_error` describes its last
    exception. `undelivered` has the step and the method of each call that was not completed.
    """

    name: str
    tracker: Tracker
    max_failures: float = field(default=MAX_FAILURES, kw_only=True)
    disabled_reason: str | None = field(default=None, init=False)
    last_error: str | None = field(default=None, init=False)
    undelivered: set[tuple[int | None, str]] = field(
        default_factory=set[tuple[int | None, str]], init=False
    )
    _num_failures: int = field(default=0, init=False)

    def send(self, call: Call) -> None:
        """Make a call unless the tracker is disabled; the last of `max_failures` disables it."""
        self.undelivered.add((call.step, call.method))
        if self.disabled_reason is not None:
            return
        try:
            if call.method not in _OPTIONAL or hasattr(self.tracker, call.method):
                getattr(self.tracker, call.method)(*call.arguments)
            self.undelivered.discard((call.step, call.method))
        except (Exception, SystemExit) as error:  # a failing tracker must not stop the run
            if isinstance(error, Terminated | TimeUp):
                raise
            self._num_failures += 1
            from rlctl.code_places import plugin_packages, users_place

            place = users_place(error, plugin_packages)
            self.last_error = f"{call.method}: {type(error).__name__}: {error}"
            if place is not None:
                self.last_error += f" ({place})"
            if self._num_failures >= self.max_failures:
                self.disable(f"{MAX_FAILURES} failures, the last in {self.last_error}")

    def disable(self, reason: str) -> None:
        """Make no more calls; the first reason stays."""
        self.disabled_reason = self.disabled_reason or reason

    @property
    def missed_steps(self) -> list[int]:
        """Steps with a call that was not completed."""
        return sorted({step for step, _ in self.undelivered.copy() if step is not None})

    def shortfall(self) -> dict[str, Any]:
        """Return the fields of an event: the cause, and the steps known to be missed, as ranges."""
        ranges: list[tuple[int, int]] = []
        for step in self.missed_steps:
            first = step
            if ranges and ranges[-1][1] == step - 1:
                first = ranges.pop()[0]
            ranges.append((first, step))
        why = self.disabled_reason or self.last_error
        return {"tracker": self.name, "why": why, "steps": ranges}


def log_call(step: int, metrics: Mapping[str, float]) -> Call:
    """Return the call of `Tracker.log` with the finite metrics, as Python ints and floats."""
    row = {
        name: value if isinstance(value, int) else float(value)
        for name, value in metrics.items()
        if math.isfinite(value)
    }
    return Call("log", (step, row), step)


def sample_calls(run: RunInfo, step: int, samples: Sequence[Sample]) -> list[Call]:
    """Return the call of `Tracker.generations` with the selected samples, unless there are none.

    Episodes are shown as transcripts.
    """
    shown = run.select_samples(samples)
    if not shown:
        return []
    return [Call("generations", (step, [_as_transcript(sample) for sample in shown]), step)]


def _as_transcript(sample: Sample) -> Sample:
    if sample.episode is None:
        return sample
    from rlctl.episodes import transcript

    return replace(sample, response=transcript(sample.episode))
