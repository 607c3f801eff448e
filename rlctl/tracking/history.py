"""Calls of trackers, and their replay from a run's record to a tracker that lacks them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError
from rlctl.log import warn_once
from rlctl.tracking.episodes import transcript
from rlctl.tracking.jsonl import (
    METRICS_FILE,
    generations_file,
    metric_rows,
    read_generations,
    read_lines,
)
from rlctl.tracking.tracker import RunInfo, Sample

# Kinds of events: trackers that received everything that an attempt sent, a tracker that missed
# steps, and a tracker that `rlctl runs sync` updated.
DELIVERED, MISSED, SYNCED = "trackers_told", "tracker_missed", "tracker_synced"
_OPTIONAL = ("phase", "episodes", "alarm")  # methods that not every tracker has


@dataclass(frozen=True)
class TrackerCall:
    """Call of a tracker's method, and the training step that it belongs to, if any."""

    name: str
    step: int | None
    arguments: tuple[Any, ...]

    def apply(self, tracker: object) -> None:
        """Call the method; a tracker without an optional method ignores the call."""
        if self.name not in _OPTIONAL or hasattr(tracker, self.name):
            getattr(tracker, self.name)(*self.arguments)


def log_call(step: int, metrics: Mapping[str, float]) -> TrackerCall:
    """Return a `Tracker.log` call with the finite metrics of a step, as Python ints and floats."""
    row = {
        name: value if isinstance(value, int) else float(value)
        for name, value in metrics.items()
        if math.isfinite(value)
    }
    return TrackerCall("log", step, (step, row))


def sample_call(step: int, samples: Sequence[Sample]) -> TrackerCall:
    """Return a `Tracker.generations` call with the samples of a step, episodes as transcripts."""
    shown = [
        sample if sample.episode is None else replace(sample, response=transcript(sample.episode))
        for sample in samples
    ]
    return TrackerCall("generations", step, (step, shown))


def missing_steps(run: Path, logger: str, steps: Iterable[int]) -> set[int]:
    """Return the members of `steps` that a logger may lack, from the events in the run's folder.

    A complete attempt records what each logger missed. SDKs buffer in memory, so after an attempt
    that was killed the logger counts as having none of its steps. With a broken line among the
    events it counts as having no step at all.
    """
    all_steps = set(steps)
    missing = set(all_steps)
    broken: list[int] = []
    for event in read_lines(run / "events.jsonl", lambda _, lines: broken.extend(lines)):
        kind = event.get("kind")
        if kind == "resume":
            missing |= {step for step in all_steps if step > event["step"] or event["step"] == 0}
        elif logger not in (
            event.get("trackers", ()) if kind == DELIVERED else (event.get("tracker"),)
        ):
            continue
        elif kind in (DELIVERED, SYNCED):
            missing = set[int]()
        elif kind == MISSED:
            ranges = [range(first, last + 1) for first, last in event["steps"]]
            missing = {step for step in all_steps if any(step in range_ for range_ in ranges)}
    return all_steps if broken else missing


def replay(run: RunInfo, steps: Collection[int]) -> Iterator[tuple[int, list[TrackerCall]]]:
    """Yield each recorded member of `steps` with its calls, oldest first.

    Samples that cannot be read are left out, with one warning for each file.
    """
    for row in metric_rows(run.folder / METRICS_FILE) if steps else ():
        step = int(row["step"])
        if step not in steps:
            continue
        calls = [log_call(step, {name: value for name, value in row.items() if name != "step"})]
        try:
            samples = run.select_samples(read_generations(generations_file(run.folder, step)))
            calls = [sample_call(step, samples), *calls] if samples else calls
        except (ConfigError, OSError) as error:
            warn_once(f"the samples of step {step} are not replayed: {error}")
        yield step, calls
