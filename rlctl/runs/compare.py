"""Comparison of runs: settings that differ, and metrics at the same step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.monitoring.run_summary import lower_is_better
from rlctl.runs.details import changed_settings
from rlctl.runs.digests import config_digest
from rlctl.runs.run import Run
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics

Curve = Mapping[int, float]  # step -> value


@dataclass(frozen=True)
class MetricRow:
    """One metric of every run, None for runs without it.

    `at` are the values at `step`, the last step shared by all runs that have the metric.
    """

    step: int | None
    at: Sequence[float | None]
    last: Sequence[float | None]
    best: Sequence[float | None]
    best_step: Sequence[int | None]

    @classmethod
    def from_curves(cls, name: str, curves: Sequence[Curve]) -> MetricRow:
        """Build the row from one curve per run, empty for a run without the metric."""
        shared = set.intersection(*(set(curve) for curve in curves if curve))
        step = max(shared, default=None)
        sign = 1 if lower_is_better(name) else -1
        best = [
            min(curve, key=lambda at, curve=curve: (sign * curve[at], at)) if curve else None
            for curve in curves
        ]
        return cls(
            step=step,
            at=[curve.get(step) if step is not None else None for curve in curves],
            last=[curve[max(curve)] if curve else None for curve in curves],
            best=[
                curve[at] if at is not None else None
                for curve, at in zip(curves, best, strict=True)
            ],
            best_step=best,
        )


@dataclass(frozen=True)
class Comparison:
    """Values of all runs: `settings` by key, `metrics` by name, `curves` by name and step."""

    runs: Sequence[str]
    settings: Mapping[str, Sequence[Any]]
    metrics: Mapping[str, MetricRow]
    curves: Mapping[str, Mapping[int, Sequence[float | None]]]


def compare(runs: Sequence[Run], changed: bool = False) -> Comparison:
    """Compare runs: settings that any of them changes from the base, and all metrics.

    With `changed`, only what differs between the runs. Raises ConfigError for damaged metrics.
    """
    columns = [_curves(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    curves = {name: [column.get(name, {}) for column in columns] for name in names}
    if changed:
        curves = {name: each for name, each in curves.items() if _differ(each)}
    return Comparison(
        runs=[run.key for run in runs],
        settings=_settings(runs, changed),
        metrics={name: MetricRow.from_curves(name, each) for name, each in curves.items()},
        curves={name: _by_step(each) for name, each in curves.items()},
    )


def _settings(runs: Sequence[Run], changed: bool) -> dict[str, list[Any]]:
    """Return settings that differ between runs or, unless `changed`, from the base config."""
    configs = [config_digest(run.path / "config.yaml") for run in runs]
    touched = set() if changed else {key for run in runs for key in changed_settings(run.path)}
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [config.get(key) for config in configs] for key in keys}
    return {key: row for key, row in rows.items() if key in touched or _differ(row)}


def _differ(row: Sequence[Any]) -> bool:
    return any(value != row[0] for value in row)


def _curves(run: Run) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in read_metrics(run.path / METRICS_FILE):
        for name, value in row.items():
            if name != "step" and math.isfinite(value):
                found.setdefault(name, {})[int(row["step"])] = value
    return found


def _by_step(curves: Sequence[Curve]) -> dict[int, list[float | None]]:
    steps = sorted({step for curve in curves for step in curve})
    return {step: [curve.get(step) for curve in curves] for step in steps}


def distinct(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without repeated folders, in order."""
    return list({run.path.resolve(): run for run in runs}.values())
