"""Curves of a report: every metric by step, time and tokens, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.monitoring.run_summary import SECONDS, TOKENS
from rlctl.tracking.metric_table import Column, MetricTable

MAX_POINTS = 2000  # of a curve: about the width of a screen in pixels
_PHASES = "timing_s/"
# Parts of a step's time that `timing_s/step` leaves out.
_ELSEWHERE = (("timing_s/testing",), ("timing_s/save_checkpoint",))

Rows = NDArray[np.intp]


def curves(tables: Sequence[MetricTable]) -> dict[str, Any]:
    """Return the curves of all metrics.

    `x` has the drawn rows as `step`, `hours` and `tokens` (cumulative). `metrics` maps each metric
    to `at`, places in `x`, and its values `y`. `thinned` is True if a curve lacks points: it then
    has the minimum and the maximum of each of `MAX_POINTS / 2` equal parts, and both ends.
    """
    joined = Joined(tables)
    by_phase = _thinned(joined.figure(SECONDS))
    kept: dict[str, Rows] = {}
    thinned = False
    for name in sorted({name for table in tables for name in table.names}):
        values = joined.column(name)
        rows = np.flatnonzero(~np.isnan(values))
        # The phases of a step are stacked, so that all are drawn at the same steps.
        part = by_phase[~np.isnan(values[by_phase])] if name.startswith(_PHASES) else rows
        kept[name] = part if len(part) <= MAX_POINTS else _thinned(values)
        thinned |= len(kept[name]) < len(rows)
    drawn = np.unique(np.concatenate([*kept.values(), np.arange(len(joined.steps))[-1:]]))
    return {"thinned": thinned, **_drawn(joined, drawn, kept)}


def rows_from(tables: Sequence[MetricTable], first: int) -> dict[str, Any]:
    """Return the `x` and `metrics` of `curves` for all rows from number `first` on."""
    joined = Joined(tables)
    drawn = np.arange(first, len(joined.steps))
    new = {name for table in tables_from(tables, first) for name in table.names}
    columns = {name: joined.column(name) for name in sorted(new)}
    kept = {name: drawn[~np.isnan(values[drawn])] for name, values in columns.items()}
    return _drawn(joined, drawn, {name: rows for name, rows in kept.items() if len(rows)})


def tables_from(tables: Sequence[MetricTable], first: int) -> list[MetricTable]:
    """Return the tables that have rows from number `first` on."""
    ends = np.cumsum([len(table.steps) for table in tables])
    return [table for table, end in zip(tables, ends, strict=True) if end > first]


def _drawn(joined: Joined, drawn: Rows, kept: Mapping[str, Rows]) -> dict[str, Any]:
    """Return the `x` of the rows `drawn` and the metrics at their rows `kept`."""
    seconds = [np.nan_to_num(joined.figure(each)) for each in (SECONDS, *_ELSEWHERE)]
    hours = np.cumsum(np.sum(seconds, axis=0)) / 3600
    tokens = np.cumsum(np.nan_to_num(joined.figure(TOKENS)))
    return {
        "x": {
            "step": joined.steps[drawn].tolist(),
            "hours": [short(hour) for hour in hours[drawn].tolist()],
            "tokens": tokens[drawn].astype(np.int64).tolist(),
        },
        "metrics": {
            name: {
                "at": np.searchsorted(drawn, rows).tolist(),
                "y": [short(value) for value in joined.column(name)[rows].tolist()],
            }
            for name, rows in kept.items()
        },
    }


def short(value: float | None) -> float | None:
    """Round to six digits; None for a non-finite value."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _thinned(values: Column) -> Rows:
    """Return the rows of the least and the greatest value in each part, the first and the last."""
    rows = np.flatnonzero(~np.isnan(values))
    if len(rows) <= MAX_POINTS:
        return rows
    width = -(-len(rows) // (MAX_POINTS // 2 - 1))
    known = values[rows]
    parts = np.pad(known, (0, -len(known) % width), mode="edge").reshape(-1, width)
    firsts = np.arange(0, len(known), width)
    extremes = [firsts + pick(parts, axis=1) for pick in (np.argmin, np.argmax)]
    ends = np.array([0, len(known) - 1])
    return rows[np.unique(np.concatenate([ends, *extremes]))]


class Joined:
    """Columns of consecutive tables."""

    def __init__(self, tables: Sequence[MetricTable]) -> None:
        self.tables = tables
        self.steps = np.concatenate([np.empty(0, np.int64), *(table.steps for table in tables)])

    def column(self, name: str) -> Column:
        """Return the values of a metric in all rows, NaN where a row lacks it."""
        return np.concatenate([np.empty(0), *(table.column(name) for table in self.tables)])

    def figure(self, names: Sequence[str]) -> Column:
        """Return the value of the first of `names` that each row has, else NaN."""
        return np.concatenate([np.empty(0), *(table.figure(names) for table in self.tables)])
