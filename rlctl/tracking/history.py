"""What a run has told its record, told again: to a tracker that begins late, or that missed a part of it."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence

from rlctl.tracking.jsonl import METRICS_FILE, generations_file, read_generations, read_metrics
from rlctl.tracking.mirror import Call
from rlctl.tracking.tracker import RunInfo, Sample


def history(run: RunInfo, steps: Container[int]) -> Iterator[Call]:
    """Metrics and shown answers of these steps, oldest first. Errors: ConfigError for a record that is damaged."""
    for row in read_metrics(run.folder / METRICS_FILE):
        step = int(row["step"])
        if step in steps:
            shown = run.shown(read_generations(generations_file(run.folder, step)))
            if shown:
                yield sample_call(step, shown)
            yield log_call(step, {name: value for name, value in row.items() if name != "step"})


def log_call(step: int, metrics: Mapping[str, float]) -> Call:
    """The finite metrics of a step, as Python's own numbers."""
    row = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items() if math.isfinite(value)}
    return Call("log", step, lambda tracker: tracker.log(step, row))


def sample_call(step: int, samples: Sequence[Sample]) -> Call:
    return Call("generations", step, lambda tracker: tracker.generations(step, samples))
