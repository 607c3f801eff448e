"""What a run has told its record, told again: to a tracker that begins late, missed a part of it, or was killed before it had kept it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rlctl.tracking.async_tracker import History, TrackerCall
from rlctl.tracking.jsonl import (
    METRICS_FILE,
    generations_file,
    read_generations,
    read_lines,
    read_metrics,
)
from rlctl.tracking.tracker import RunInfo, Sample

# Kinds of events: trackers that took everything that an attempt told them, one that did not, one that was told later.
TOLD, MISSED, SYNCED = "trackers_told", "tracker_missed", "tracker_synced"


def missing_steps(run: Path, logger: str, steps: Iterable[int]) -> set[int]:
    """Which of these steps a logger is not known to have, by the events of the run in this folder.

    An attempt that ended in order says what each logger missed. SDKs keep what they are told in memory for a while, so of an attempt that
    was killed a logger may have anything, and counts as having nothing.
    """
    every = set(steps)
    found = set(every)
    for event in read_lines(run / "events.jsonl"):
        kind = event["kind"]
        if kind == "resume":
            found |= {step for step in every if step > event["step"] or event["step"] == 0}
        elif (kind == TOLD and logger in event["trackers"]) or (
            kind == SYNCED and event["tracker"] == logger
        ):
            found = set[int]()
        elif kind == MISSED and event["tracker"] == logger:
            found = {
                step for first, last in event["steps"] for step in range(first, last + 1)
            } & every
    return found


def history(run: RunInfo, steps: Collection[int]) -> History:
    """These steps with their shown answers and metrics, oldest first. Errors: ConfigError for a record that is damaged."""
    if not steps:
        return steps, ()
    return steps, (
        _both(run, row) for row in read_metrics(run.folder / METRICS_FILE) if row["step"] in steps
    )


def _both(run: RunInfo, row: Mapping[str, float]) -> TrackerCall:
    step = int(row["step"])
    log = log_call(step, {name: value for name, value in row.items() if name != "step"})
    shown = run.shown(read_generations(generations_file(run.folder, step)))
    if not shown:
        return log
    answers = sample_call(step, shown)
    return TrackerCall("log", step, lambda tracker: (answers.say(tracker), log.say(tracker)))


def log_call(step: int, metrics: Mapping[str, float]) -> TrackerCall:
    """The finite metrics of a step, as Python's own numbers."""
    row = {
        name: value if isinstance(value, int) else float(value)
        for name, value in metrics.items()
        if math.isfinite(value)
    }
    return TrackerCall("log", step, lambda tracker: tracker.log(step, row))


def sample_call(step: int, samples: Sequence[Sample]) -> TrackerCall:
    return TrackerCall("generations", step, lambda tracker: tracker.generations(step, samples))
