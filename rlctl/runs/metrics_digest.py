"""Digest of a run's metrics: its summary, and a few values of each metric.

The digest of a file that has grown since is extended by the new rows alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from rlctl.monitoring.run_summary import (
    LOSS,
    REWARD,
    SECONDS,
    TOKENS,
    RunSummary,
    lower_is_better,
    validation_metric,
)
from rlctl.tracking.jsonl import METRICS_FILE, Position
from rlctl.tracking.metric_table import Column, MetricTable, metric_tables

if TYPE_CHECKING:
    from rlctl.runs.run import Run

_MARK_BYTES = 4096
_MAX_CURVE = 64  # points that a listing draws
_EMPTY = RunSummary.from_rows([])

Curve = tuple[int, int, list[float]]


def metrics_digest(
    path: Path,
    earlier: Mapping[str, Any] | None = None,
    keep: Callable[[MetricTable], object] = lambda _: None,
) -> dict[str, Any]:
    """Return `summary` (fields of `RunSummary`), `series` of all metrics, `curves` and `problem`.

    `series` maps a metric to its values in the order `SERIES`, `curves` reward, loss and validation
    to the number of their values, a stride, and the values at it (64 at most). For an unreadable
    file `problem` is the reason, `summary` null and the others empty; for a file with broken lines
    it names them.
    `read` is the place where reading ended: if the file has only grown since the `earlier` digest,
    reading starts there. `keep` receives every table that is read.
    """
    problems: list[str] = []
    try:
        base = earlier if earlier is not None and has_grown(path, earlier["read"]) else None
        position = Position(*base["read"]["position"]) if base else Position()
        summary = RunSummary(**base["summary"]) if base else _EMPTY
        series: dict[str, Sequence[float]] = dict(base["series"]) if base else {}
        curves: dict[str, Curve] = dict(base["curves"]) if base else {}
        for table in metric_tables(path, lambda message, _: problems.append(message), position):
            keep(table)
            summary = _extended(summary, table)
            for name, values in _values(table).items():
                series[name] = _joined(series[name], values) if name in series else values
            for name in (*REWARD, *LOSS, *([summary.metric] if summary.metric else [])):
                curves[name] = _extended_curve(curves.get(name, (0, 1, [])), table.column(name))
        return {
            "summary": dataclasses.asdict(summary),
            "series": series,
            "curves": {name: curve for name, curve in curves.items() if curve[0]},
            "problem": (base or {}).get("problem") or (problems[0] if problems else None),
            "read": _place(path, position),
        }
    except OSError as error:
        return {"summary": None, "series": {}, "curves": {}, "problem": str(error), "read": None}


def read_tables(run: Run) -> list[MetricTable]:
    """Return all metrics of a run, and set its digest, from one reading of the file."""
    tables: list[MetricTable] = []
    # Broken lines are named by the `problem` of the digest.
    run.metrics_cache.append(metrics_digest(run.path / METRICS_FILE, keep=tables.append))
    return tables


def _place(path: Path, position: Position) -> dict[str, Any] | None:
    """Return the end of reading, with a checksum of the bytes before it."""
    if not position.offset:
        return None
    return {
        "position": dataclasses.astuple(position),
        "inode": path.stat().st_ino,
        "mark": _mark(path, position.offset),
    }


def has_grown(path: Path, place: Mapping[str, Any] | None) -> bool:
    """Return True if lines were appended after `place` and the file is otherwise the same."""
    if place is None or not path.exists():
        return False
    status, offset = path.stat(), place["position"][0]
    return (
        status.st_ino == place["inode"]
        and status.st_size >= offset
        and _mark(path, offset) == place["mark"]
    )


def _mark(path: Path, end: int) -> int:
    with path.open("rb") as file:
        file.seek(max(0, end - _MARK_BYTES))
        return crc32(file.read(min(end, _MARK_BYTES)))


def _values(table: MetricTable) -> dict[str, Sequence[float]]:
    """Return the values `SERIES` of each metric that has any."""
    known = ~np.isnan(table.values)
    columns = np.arange(len(table.names))
    first, last = known.argmax(axis=0), len(known) - 1 - known[::-1].argmax(axis=0)
    rows = zip(
        table.names,
        table.values[first, columns].tolist(),
        table.values[last, columns].tolist(),
        np.fmin.reduce(table.values, axis=0).tolist(),
        np.fmax.reduce(table.values, axis=0).tolist(),
        known.sum(axis=0).tolist(),
        strict=True,
    )
    return {name: values for name, *values in rows if values[-1]}


def _joined(earlier: Sequence[float], later: Sequence[float]) -> Sequence[float]:
    first, _, low, high, number = earlier
    _, last, new_low, new_high, more = later
    return [first, last, min(low, new_low), max(high, new_high), number + more]


def _extended(summary: RunSummary, table: MetricTable) -> RunSummary:
    """Return the summary of the rows that `summary` is of and those of `table`."""
    metric = summary.metric or _main_validation(table)
    found = {
        "step": int(table.steps[-1]),
        "metric": metric,
        "seconds": summary.seconds + float(np.nansum(table.figure(SECONDS))),
        "tokens": summary.tokens + int(np.nansum(table.figure(TOKENS))),
    }
    values = table.column(metric) if metric else np.empty(0)
    rows = np.flatnonzero(~np.isnan(values))
    if metric and len(rows):
        lowest = lower_is_better(metric)
        row = np.nanargmin(values) if lowest else np.nanargmax(values)
        best, step = float(values[row]), int(table.steps[row])
        found["last"] = float(values[rows[-1]])
        if summary.first is None:
            found["first"] = float(values[rows[0]])
        if summary.best is None or (best < summary.best if lowest else best > summary.best):
            found |= {"best": best, "best_step": step}
    return dataclasses.replace(summary, **found)


def _extended_curve(earlier: Curve, column: Column) -> Curve:
    """Return the curve with the values of `column`; the result does not depend on the parts."""
    number, stride, points = earlier
    values = column[~np.isnan(column)]
    points = [*points, *values[-number % stride :: stride].tolist()]
    while len(points) > _MAX_CURVE:
        points, stride = points[::2], 2 * stride
    return number + len(values), stride, points


def _main_validation(table: MetricTable) -> str | None:
    """Return the main metric of the first row with a validation."""
    candidates = [
        name for name in table.names if name.startswith("val") and validation_metric({name: 0.0})
    ]
    if not candidates:
        return None
    known = ~np.isnan(np.stack([table.column(name) for name in candidates]))
    row = known.any(axis=0).argmax()
    return validation_metric(
        {name: 0.0 for name, has in zip(candidates, known[:, row], strict=True) if has}
    )
