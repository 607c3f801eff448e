"""Mean and 95 % interval over runs that differ in nothing but their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.plugins.console.report.curves import MAX_POINTS, Chosen, Rows, axes_of, short
from rlctl.runs.run import Run
from rlctl.runs.run_comparison import Curve
from rlctl.runs.settings import read_settings
from rlctl.runs.student_t import t_quantile
from rlctl.tracking.metric_table import Column, MetricTable

Band = tuple[Column, Column, NDArray[np.intp]]  # mean, half of the interval, number of runs

# Names and places of a run, which change nothing in its training.
NAMES = {
    *("trainer.experiment_name", "trainer.project_name", "trainer.run_dir", "trainer.logger"),
    *("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
}


def seed_groups(runs: Sequence[Run]) -> list[list[int]]:
    """Return places of runs with equal settings and data but other seeds, two or more together.

    Of runs with the same seeds the first one counts: a repetition is no further sample.
    """
    groups: dict[Any, dict[Any, int]] = {}
    for place, run in enumerate(runs):
        settings = read_settings(run.path)
        seeds = tuple((key, repr(value)) for key, value in settings.items() if _is_seed(key))
        same = {
            key: repr(value)
            for key, value in settings.items()
            if not _is_seed(key) and key not in NAMES
        }
        data = run.record.data if run.record else {}
        if seeds:
            group = groups.setdefault((frozenset(same.items()), frozenset(data.items())), {})
            group.setdefault(seeds, place)
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2].endswith("seed")


def seed_bands(
    runs: Sequence[Run],
    labels: Sequence[str],
    tables: Sequence[MetricTable],
    chosen: Chosen = lambda _: True,
) -> list[dict[str, Any]]:
    """Return a group for each of `seed_groups`, whose `chosen` metrics are drawn as a run's.

    A metric has its mean `y`, the 95 % interval of the mean from `low` to `high` (Student's t), and
    their number of runs `n`, at each step at which two or more runs have a value. `x` of a step is
    the mean of `x` of the runs that have it. Long curves are thinned to every 2nd, 4th, … step.
    """
    return [
        {
            "label": _label([labels[place] for place in group]),
            "runs": group,
            **_bands([tables[place] for place in group], chosen),
        }
        for group in seed_groups(runs)
    ]


def _label(names: Sequence[str]) -> str:
    """Return the common start of the names without a number or a word for the seed at its end."""
    first = min(names)
    last = max(names)  # the beginning that these two share is that of all
    length = next(
        (at for at, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1),
        len(first),
    )
    common = first[:length].rstrip("0123456789").rstrip("-_. /=")
    for word in ("seed", "s"):
        if common.endswith((f"-{word}", f"_{word}", f".{word}")):
            common = common[: -len(word) - 1]
    return common or names[0]


def _bands(tables: Sequence[MetricTable], chosen: Chosen) -> dict[str, Any]:
    names = sorted({name for table in tables for name in table.names if chosen(name)})
    steps = np.unique(np.concatenate([table.steps for table in tables]))
    kept: dict[str, Rows] = {}
    bands: dict[str, Band] = {}
    for name in names:
        values = [_aligned(Curve.from_table(table, name), steps) for table in tables]
        at = _thinned(np.flatnonzero(np.count_nonzero(~np.isnan(values), axis=0) > 1))
        if len(at):
            kept[name] = at
            bands[name] = interval(np.array(values)[:, at])
    drawn = np.unique(np.concatenate([*kept.values(), np.empty(0, np.intp)]))
    by_run = [(table, axes_of(table)) for table in tables]
    x: dict[str, list[Any]] = {"step": steps[drawn].tolist()}
    for name in ("hours", "tokens"):
        axes = [Curve.from_values(table.steps, found[name]) for table, found in by_run]
        x[name] = _shorts(np.nanmean([_aligned(axis, steps[drawn]) for axis in axes], axis=0))
    metrics = {
        name: {
            "at": np.searchsorted(drawn, kept[name]).tolist(),
            "y": _shorts(mean),
            "low": _shorts(mean - half),
            "high": _shorts(mean + half),
            "n": number.tolist(),
        }
        for name, (mean, half, number) in bands.items()
    }
    return {"x": x, "metrics": metrics}


def _shorts(values: Column) -> list[float | None]:
    return [short(value) for value in values.tolist()]


def _thinned(places: Rows) -> Rows:
    """Return the places, or every 2nd, 4th, … of them, at most `MAX_POINTS`."""
    stride = 1
    while len(places) > MAX_POINTS * stride:
        stride *= 2
    return places[::stride]


def _aligned(curve: Curve, steps: NDArray[np.int64]) -> Column:
    """Return the values of a curve at `steps`, NaN where it has none."""
    found = np.full(len(steps), np.nan)
    _, here, there = np.intersect1d(steps, curve.steps, return_indices=True)
    found[here] = curve.values[there]
    return found


def interval(values: NDArray[np.float64]) -> Band:
    """Return mean, half of the 95 % interval and number of the known values of each column.

    Each column has two known values or more.
    """
    number = np.count_nonzero(~np.isnan(values), axis=0)
    quantiles = np.array([t_quantile(int(count) - 1) for count in number])
    error = np.nanstd(values, axis=0, ddof=1) / np.sqrt(number)
    return np.nanmean(values, axis=0), quantiles * error, number
