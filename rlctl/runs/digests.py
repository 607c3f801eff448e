"""Digests of a run's files: small JSON values that the index caches until the file changes."""

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
    """File of a run's folder, the function that digests it, and the digest of a missing file."""

    file: str
    digest: Callable[[Path], Any]
    absent: Any


def metrics_digest(path: Path) -> dict[str, Any]:
    """Return `summary` (fields of `RunSummary`), `series` of all metrics, and `problem`.

    For an unreadable file `problem` is the reason, `summary` null and `series` empty; for a file
    with broken lines it names them.
    """
    problems: list[str] = []
    try:
        rows = read_metrics(path, lambda message, _: problems.append(message))
    except OSError as error:
        return {"summary": None, "series": {}, "problem": str(error)}
    columns: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and math.isfinite(value):
                columns.setdefault(name, []).append((value, int(row["step"])))
    series = {name: _extremes(points) for name, points in columns.items()}
    return {
        "summary": dataclasses.asdict(RunSummary.from_rows(rows)),
        "series": series,
        "problem": problems[0] if problems else None,
    }


def _extremes(points: list[tuple[float, int]]) -> dict[str, float | int]:
    """Return first and last value, minimum and maximum with their first steps, and the count."""
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
    """Return the composed config as dotted key -> value; empty for an unreadable file."""
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
