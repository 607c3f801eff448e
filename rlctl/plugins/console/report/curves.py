"""Curves of a report: every metric by step, time and tokens, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.tracking.metric_table import Column, MetricTable
from rlctl.tracking.run_summary import OUTSIDE_A_STEP, SECONDS, TOKENS

MAX_POINTS = 2000  # of a curve: about the width of a screen in pixels
_PHASES = "timing_s/"

Rows = NDArray[np.intp]
Chosen = Callable[[str], bool]  # of the names of metrics


def curves(table: MetricTable, chosen: Chosen = lambda _: True) -> dict[str, Any]:
    """Return the curves of the `chosen` metrics, by default of all.

    `x` has the drawn rows as `step`, `hours` and `tokens` (cumulative). `metrics` maps each metric
    to `at`, places in `x`, and its values `y`. `thinned` is True if a curve lacks points: it then
    has the minimum and the maximum of each of `MAX_POINTS / 2` equal parts, and both ends.
    """
    by_phase = _thinned(table.figure(SECONDS))
    kept: dict[str, Rows] = {}
    thinned = False
    for name in sorted(filter(chosen, table.names)):
        values = table.column(name)
        rows = np.flatnonzero(~np.isnan(values))
        # The phases of a step are stacked, so that all are drawn at the same steps.
        kept[name] = by_phase[~np.isnan(values[by_phase])] if name.startswith(_PHASES) else rows
        if len(kept[name]) > MAX_POINTS:
            kept[name] = _thinned(values)
        thinned |= len(kept[name]) < len(rows)
    drawn = np.unique(np.concatenate([*kept.values(), np.arange(len(table.steps))[-1:]]))
    return {"thinned": thinned, **_drawn(table, drawn, kept)}


def rows_from(table: MetricTable, first: int) -> dict[str, Any]:
    """Return the `x` and `metrics` of `curves` for all rows from number `first` on."""
    drawn = np.arange(first, len(table.steps))
    kept = {name: drawn[~np.isnan(table.column(name)[drawn])] for name in sorted(table.names)}
    return _drawn(table, drawn, {name: rows for name, rows in kept.items() if len(rows)})


def _drawn(table: MetricTable, drawn: Rows, kept: Mapping[str, Rows]) -> dict[str, Any]:
    """Return the `x` of the rows `drawn` and the metrics at their rows `kept`."""
    axes = axes_of(table)
    return {
        "x": {
            "step": table.steps[drawn].tolist(),
            "hours": [short(hour) for hour in axes["hours"][drawn].tolist()],
            "tokens": axes["tokens"][drawn].astype(np.int64).tolist(),
        },
        "metrics": {
            name: {
                "at": np.searchsorted(drawn, rows).tolist(),
                "y": [short(value) for value in table.column(name)[rows].tolist()],
            }
            for name, rows in kept.items()
        },
    }


def axes_of(table: MetricTable) -> dict[str, Column]:
    """Return the cumulative `hours` and `tokens` of each row."""
    seconds = [np.nan_to_num(table.figure(names)) for names in (SECONDS, *OUTSIDE_A_STEP)]
    return {
        "hours": np.cumsum(np.sum(seconds, axis=0)) / 3600,
        "tokens": np.cumsum(np.nan_to_num(table.figure(TOKENS))),
    }


def short(value: float | None) -> float | None:
    """Round to six digits; None for a non-finite value."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


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
