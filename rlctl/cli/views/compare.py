"""Tables of `rlctl compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlctl.cli.console import notice, stdout, table
from rlctl.cli.views.runs import SHOWN_METRICS, short
from rlctl.monitoring.text import percent_or_number

if TYPE_CHECKING:
    from rlctl.runs.compare import Comparison

_WITH_BEST = ("val-core/", "critic/score", "train/loss")


def print_comparison(comparison: Comparison, changed: bool) -> None:
    """Print the settings and the most important metrics; `changed`: only differences were kept."""
    names = _names(comparison)
    if comparison.settings:
        rows = [[key, *map(short, row)] for key, row in comparison.settings.items()]
        stdout().print(table(["setting", *names], rows))
    elif changed:
        notice("the runs have the same settings")
    shown = [name for name in comparison.metrics if name.startswith("val-core/")]
    shown += [name for name in SHOWN_METRICS if name in comparison.metrics]
    rows = [row for metric in shown for row in _metric_rows(comparison, metric)]
    if rows:
        stdout().print()
        stdout().print(table(["metric", "", "step", *names], rows, right=["step", *names]))
    hidden = len(comparison.metrics) - len(shown)
    if hidden:
        notice(f"{hidden} more metrics: --json prints all, --metric NAME prints one step by step")


def print_curves(comparison: Comparison, metrics: Sequence[str]) -> None:
    """Print one table per metric, with a row per step."""
    names = _names(comparison)
    for metric in metrics:
        rows = [
            [str(step), *("-" if value is None else f"{value:.5g}" for value in values)]
            for step, values in comparison.curves[metric].items()
        ]
        stdout().print(table([metric, *names], rows, right=names))


def _metric_rows(comparison: Comparison, metric: str) -> list[list[str]]:
    row = comparison.metrics[metric]
    step = "-" if row.step is None else str(row.step)
    rows = [
        [metric, "at step", step, *(percent_or_number(metric, value) for value in row.at)],
        ["", "at the end", "", *(percent_or_number(metric, value) for value in row.last)],
    ]
    if metric.startswith(_WITH_BEST):
        steps = ["" if step is None else f" @{step}" for step in row.best_step]
        best = [percent_or_number(metric, value) for value in row.best]
        rows.append(["", "best", "", *map("".join, zip(best, steps, strict=True))])
    return rows


def _names(comparison: Comparison) -> list[str]:
    """Return the names of the runs, with their projects if two runs share a name."""
    short_names = [run.partition("/")[2] for run in comparison.runs]
    unique = len(set(short_names)) == len(short_names)
    return short_names if unique else list(comparison.runs)
