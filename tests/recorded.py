"""Records of runs, written as training writes them, and the environment of commands."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlctl.tracking.jsonl import JsonlTracker
from rlctl.tracking.tracker import RunInfo, Sample


def record(
    folder: Path,
    rows: Mapping[int, Mapping[str, float]],
    samples: Mapping[int, Sequence[Sample]] | None = None,
) -> None:
    """Write metrics and validation samples by step into the folder of a run."""
    tracker = JsonlTracker()
    tracker.start(RunInfo("id", "p", "r", folder, max(rows, default=1), {}))
    for step, metrics in rows.items():
        tracker.log(step, metrics)
    for step, answers in (samples or {}).items():
        tracker.generations(step, answers)
    tracker.finish("finished")


def plain_environment(**changes: str) -> dict[str, str]:
    """Return the environment without variables of rlctl and of colours, with `changes`."""
    prefixes = ("RLCTL_", "NO_COLOR", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return kept | changes
