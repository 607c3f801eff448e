"""Comparison of runs: settings that differ, and metrics at the same step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlctl.plugins import load
from rlctl.runs.details import changed_settings
from rlctl.runs.run import Run
from rlctl.runs.settings import read_settings
from rlctl.tracking.jsonl import METRICS_FILE
from rlctl.tracking.metric_table import Column, MetricTable
from rlctl.tracking.run_summary import lower_is_better


@dataclass(frozen=True)
class Curve:
    """Finite values of one metric of a run, and their steps in ascending order."""

    steps: NDArray[np.int64]
    values: Column

    @classmethod
    def from_table(cls, table: MetricTable, name: str) -> Self:
        """Build the curve of a metric; of rows with the same step the last one counts."""
        return cls.from_values(table.steps, table.column(name))

    @classmethod
    def from_values(cls, all_steps: NDArray[np.int64], values: Column) -> Self:
        """Build the curve of the values that are known; of one step the last one counts."""
        known = ~np.isnan(values)
        newest_first = all_steps[known][::-1]
        steps, places = np.unique(newest_first, return_index=True)
        return cls(steps, values[known][::-1][places])

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, step: int | None) -> float | None:
        """Return the value at a step, None without one."""
        found = np.flatnonzero(self.steps == step)
        if not len(found):
            return None
        return float(self.values[found[0]])

    @property
    def last(self) -> float | None:
        """Last value, None without one."""
        if not len(self):
            return None
        return float(self.values[-1])

    def best(self, name: str) -> tuple[float, int] | tuple[None, None]:
        """Return the best value and the first step that has it."""
        if not len(self):
            return None, None
        place = np.argmax(self.values)
        if lower_is_better(name):
            place = np.argmin(self.values)
        return float(self.values[place]), int(self.steps[place])

    def same(self, other: Curve) -> bool:
        """Return True for equal steps and values."""
        return np.array_equal(self.steps, other.steps) and np.array_equal(self.values, other.values)


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
        shared = functools.reduce(np.intersect1d, (curve.steps for curve in curves if len(curve)))
        step = None
        if len(shared):
            step = int(shared[-1])
        best = [curve.best(name) for curve in curves]
        return cls(
            step=step,
            at=[curve.at(step) for curve in curves],
            last=[curve.last for curve in curves],
            best=[value for value, _ in best],
            best_step=[step for _, step in best],
        )


class Curves(Mapping[str, Mapping[int, Sequence[float | None]]]):
    """Values of every run by metric and step; built when they are looked up."""

    def __init__(self, curves: Mapping[str, Sequence[Curve]]) -> None:
        self._curves = curves

    def __getitem__(self, name: str) -> Mapping[int, Sequence[float | None]]:
        by_run = [
            dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
            for curve in self._curves[name]
        ]
        steps = sorted({step for values in by_run for step in values})
        return {step: [values.get(step) for values in by_run] for step in steps}

    def __iter__(self) -> Iterator[str]:
        return iter(self._curves)

    def __len__(self) -> int:
        return len(self._curves)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Values of all runs: `settings` by key, `metrics` by name, `curves` by name and step."""

    runs: Sequence[str]
    settings: Mapping[str, Sequence[Any]]
    metrics: Mapping[str, MetricRow]
    curves: Curves

    def __repr__(self) -> str:
        sizes = f"{len(self.settings)} settings, {len(self.metrics)} metrics"
        return f"<Comparison of {len(self.runs)} runs: {sizes}>"

    def _repr_html_(self) -> str:
        """Return tables and curves for notebooks."""
        return load("python_api", "html")(self)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {
            "runs": self.runs,
            "settings": self.settings,
            "metrics": {name: dataclasses.asdict(row) for name, row in self.metrics.items()},
            "curves": dict(self.curves),
        }


def compare(runs: Sequence[Run], changed: bool = False) -> Comparison:
    """Compare runs: settings that any of them changes from the base, and all metrics.

    With `changed`, only what differs between the runs.
    """
    tables = [MetricTable.read(run.path / METRICS_FILE) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table.names)
    curves = {name: [Curve.from_table(table, name) for table in tables] for name in names}
    curves = {
        name: group
        for name, group in curves.items()
        if any(map(len, group)) and not (changed and all(map(group[0].same, group)))
    }
    return Comparison(
        runs=[run.key for run in runs],
        settings=_settings(runs, changed),
        metrics={name: MetricRow.from_curves(name, group) for name, group in curves.items()},
        curves=Curves(curves),
    )


def _settings(runs: Sequence[Run], changed: bool) -> dict[str, list[Any]]:
    """Return settings that differ between runs or, unless `changed`, from the base config."""
    configs = [read_settings(run.path) for run in runs]
    touched: set[str] = set()
    if not changed:
        touched = {key for run in runs for key in changed_settings(run.path)}
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [config.get(key) for config in configs] for key in keys}
    return {
        key: row
        for key, row in rows.items()
        if key in touched or any(value != row[0] for value in row)
    }


def distinct(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without repeated folders, in order."""
    return list({run.path.resolve(): run for run in runs}.values())
