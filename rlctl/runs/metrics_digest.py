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
    validation_metric,
)
from rlctl.runs.digests import NO_METRICS
from rlctl.tracking.jsonl import METRICS_FILE, Position
from rlctl.tracking.metric_table import Column, MetricTable, metric_tables

if TYPE_CHECKING:
    from rlctl.runs.run import Run

_MARK_BYTES = 4096
_MAX_CURVE = 64  # points that a listing draws

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
        grown = earlier is not None and has_grown(path, earlier["read"])
        base = earlier if earlier is not None and grown else NO_METRICS
        position = Position(*base["read"]["position"]) if grown else Position()
        summary = RunSummary(**base["summary"])
        series: dict[str, Sequence[float]] = dict(base["series"])
        curves: dict[str, Curve] = dict(base["curves"])
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
            "problem": next(filter(None, (base["problem"], *problems)), None),
            "read": _place(path, position),
        }
    except OSError as error:
        return NO_METRICS | {"summary": None, "problem": str(error)}


def read_table(run: Run) -> MetricTable:
    """Return all metrics of a run, and set its digest, from one reading of the file."""
    tables: list[MetricTable] = []
    # Broken lines are named by the `problem` of the digest.
    run.set_metrics(metrics_digest(run.path / METRICS_FILE, keep=tables.append))
    return MetricTable.join(tables)


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
    validations = [name for name in table.names if validation_metric({name: 0.0})]
    return dataclasses.replace(
        summary.extended(table.rows(validations)),
        step=int(table.steps[-1]),
        seconds=summary.seconds + float(np.nansum(table.figure(SECONDS))),
        tokens=summary.tokens + int(np.nansum(table.figure(TOKENS))),
    )


def _extended_curve(earlier: Curve, column: Column) -> Curve:
    """Return the curve with the values of `column`; the result does not depend on the parts."""
    number, stride, points = earlier
    values = column[~np.isnan(column)]
    points = [*points, *values[-number % stride :: stride].tolist()]
    while len(points) > _MAX_CURVE:
        points, stride = points[::2], 2 * stride
    return number + len(values), stride, points
