"""Replay of a run's recorded metrics and samples to trackers that do not have them yet."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rlctl.errors import ConfigError
from rlctl.log import warn_once
from rlctl.tracking.async_tracker import History, TrackerCall
from rlctl.tracking.jsonl import (
    METRICS_FILE,
    generations_file,
    metric_rows,
    read_generations,
    read_lines,
)
from rlctl.tracking.tracker import RunInfo, Sample
from rlctl.tracking.transcripts import with_transcript

# Kinds of events: trackers that received everything that an attempt sent, a tracker that missed
# steps, and a tracker that `rlctl runs sync` updated.
DELIVERED, MISSED, SYNCED = "trackers_told", "tracker_missed", "tracker_synced"


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
        elif (kind == DELIVERED and logger in event["trackers"]) or (
            kind == SYNCED and event["tracker"] == logger
        ):
            missing = set[int]()
        elif kind == MISSED and event["tracker"] == logger:
            missing = {
                step for first, last in event["steps"] for step in range(first, last + 1)
            } & all_steps
    return all_steps if broken else missing


def history(run: RunInfo, steps: Collection[int]) -> History:
    """Return calls that replay the metrics and selected samples of `steps`, oldest first.

    Samples that cannot be read are left out, with one warning for each file.
    """
    if not steps:
        return steps, ()
    return steps, (
        _replay_call(run, row)
        for row in metric_rows(run.folder / METRICS_FILE)
        if row["step"] in steps
    )


def _replay_call(run: RunInfo, row: Mapping[str, float]) -> TrackerCall:
    step = int(row["step"])
    log = log_call(step, {name: value for name, value in row.items() if name != "step"})
    selected: list[Sample] = []
    try:
        selected = run.select_samples(read_generations(generations_file(run.folder, step)))
    except (ConfigError, OSError) as error:
        warn_once(f"the samples of step {step} are not replayed: {error}")
    if not selected:
        return log
    samples = sample_call(step, selected)
    return TrackerCall("log", step, lambda tracker: (samples.apply(tracker), log.apply(tracker)))


def log_call(step: int, metrics: Mapping[str, float]) -> TrackerCall:
    """Return a `Tracker.log` call with the finite metrics of a step, as Python ints and floats."""
    row = {
        name: value if isinstance(value, int) else float(value)
        for name, value in metrics.items()
        if math.isfinite(value)
    }
    return TrackerCall("log", step, lambda tracker: tracker.log(step, row))


def sample_call(step: int, samples: Sequence[Sample]) -> TrackerCall:
    """Return a `Tracker.generations` call with the samples of a step, episodes as transcripts."""
    return TrackerCall(
        "generations",
        step,
        lambda tracker: tracker.generations(step, [with_transcript(each) for each in samples]),
    )
