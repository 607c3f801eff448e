"""What the registry wants to know of each file of a run: a small JSON value that can be kept as long as the file does not change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import RlctlError
from rlctl.monitoring.run_summary import RunSummary
from rlctl.runs.labels import LABELS_FILE, read_labels
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics


@dataclass(frozen=True)
class Part:
    """A file of a run's folder, what is kept of it, and what stands for a file that is not there."""

    file: str
    digest: Callable[[Path], Any]
    absent: Any


def metrics_digest(path: Path) -> dict[str, Any]:
    """`headline` (the fields of `RunSummary`), the `courses` of all metrics, and why they are null or empty where the file is damaged."""
    try:
        rows = read_metrics(path)
    except (RlctlError, OSError) as error:
        return {"headline": None, "courses": {}, "problem": str(error)}
    columns: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and math.isfinite(value):
                columns.setdefault(name, []).append((value, int(row["step"])))
    courses = {name: _course(points) for name, points in columns.items()}
    return {
        "headline": dataclasses.asdict(RunSummary.from_rows(rows)),
        "courses": courses,
        "problem": None,
    }


def _course(points: list[tuple[float, int]]) -> dict[str, float | int]:
    """First and last value, the least and the greatest with the step that had it first, and how many there are."""
    least, greatest = min(points), max(points, key=lambda point: (point[0], -point[1]))
    return {
        "first": points[0][0],
        "last": points[-1][0],
        "min": least[0],
        "min_step": least[1],
        "max": greatest[0],
        "max_step": greatest[1],
        "count": len(points),
    }


def config_digest(path: Path) -> dict[str, Any]:
    """Every key of a composed configuration with its value; empty for a file that cannot be read."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        container = yaml.load(path.read_text(encoding="utf-8"), loader)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return dict(_flat(container, "")) if isinstance(container, dict) else {}


def _flat(section: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _record_digest(path: Path) -> dict[str, Any]:
    try:
        return {"record": dataclasses.asdict(RunRecord.read(path)), "problem": None}
    except RlctlError as error:
        return {"record": None, "problem": str(error)}


RECORD = Part(RECORD_FILE, _record_digest, None)
LABELS = Part(LABELS_FILE, lambda path: dataclasses.asdict(read_labels(path.parent)), None)
METRICS = Part(METRICS_FILE, metrics_digest, metrics_digest(Path("/dev/null")))
CONFIG = Part("config.yaml", config_digest, {})
PARTS = (RECORD, LABELS, METRICS, CONFIG)
