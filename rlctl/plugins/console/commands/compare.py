"""`rlctl compare`: settings and metrics of several runs, side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from rlctl.cli import complete
from rlctl.cli.console import print_json, stdout, table
from rlctl.cli.options import Json, Root, RunNames
from rlctl.cli.stderr import notice
from rlctl.cli.table_forms import FORMS, cells
from rlctl.cli.views.runs import SHOWN_METRICS, short
from rlctl.errors import NotFoundError
from rlctl.tracking.run_summary import percent_or_number

if TYPE_CHECKING:
    from rlctl.runs.run import Run
    from rlctl.runs.run_comparison import Comparison
    from rlctl.runs.store import RunStore


app = typer.Typer()

Form = Literal["table", "csv", "md", "markdown", "tex", "json"]
Figure = Callable[[str, float | None], str]  # returns the value of a metric as text

GroupBy = Annotated[
    str | None,
    typer.Option(
        "--group-by",
        metavar="KEY",
        help="Show mean, 95 % interval and n of the runs with the same value of this setting or "
        "field, and test two groups for a difference, paired by seed.",
        autocompletion=complete.key,
    ),
]

_EXAMPLES = """
Examples:

  rlctl compare ppo-261121 grpo-261121 --changed

  rlctl compare @last @best:val-core/gsm8k/acc/mean@1

  rlctl compare a b --metric critic/score/mean      one metric, step by step

  rlctl compare seed-1 seed-2 seed-3 --format markdown

  rlctl compare my-sweep 0 3                        two trials of a sweep

  rlctl compare my-sweep other-sweep                the best trial of each

  rlctl compare my-sweep --group-by algorithm.lam   mean and 95 % interval

  rlctl compare base-1 base-2 new-1 new-2 --group-by recipe --format tex
"""


@app.command(epilog=_EXAMPLES)
def compare(
    runs: RunNames,
    changed: Annotated[
        bool,
        typer.Option("--changed", help="Show only settings and metrics that differ."),
    ] = False,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            "-m",
            metavar="METRIC",
            help="Show this metric at every step; repeat for several.",
        ),
    ] = None,
    group_by: GroupBy = None,
    form: Annotated[
        Form,
        typer.Option("--format", help="Print the tables in this form."),
    ] = "table",
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Compare the settings of runs, and their metrics at the same step.

    Runs that differ only in their seeds get a column with mean and standard deviation. Given one
    sweep, show its trials, best first, and the importance of each parameter. `SWEEP NUMBER…` and
    `SWEEP-NUMBER` are the runs of trials, and a sweep among several names is its best trial; with
    --group-by it is all its runs. A --metric of groups may be best(METRIC) and the like.
    """
    from rlctl import api
    from rlctl.cli.views.sweep import show_sweep
    from rlctl.runs.store import RunStore
    from rlctl.sweeps.selection import find_compared, whole_sweep

    store = RunStore(root)
    as_json = as_json or form == "json"
    if group_by is not None:
        print_groups(store, runs, group_by, metrics or [], form, as_json)
        return
    if len(runs) == 1 and (sweep := whole_sweep(store, runs[0])) is not None:
        show_sweep(sweep, as_json)
        return
    found = find_compared(store, runs)
    comparison = api.compare(found, changed=changed)
    for name in metrics or []:
        if name not in comparison.curves and changed:
            raise NotFoundError(f"no metric {name!r} differs between the runs")
        if name not in comparison.curves:
            raise NotFoundError(f"no run has a metric {name!r}")
    if as_json:
        print_json({**comparison.as_json(), "fields": _fields(found)})
    elif metrics:
        print_curves(comparison, metrics, form)
    else:
        print_comparison(comparison, changed, form)
        _print_fields(comparison, _fields(found), form)


def _fields(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the fields of the compared runs that plug-ins compute, such as their cost."""
    from rlctl.runs.details import plugin_fields
    from rlctl.runs.run_comparison import distinct

    return [plugin_fields(run) for run in distinct(runs)]


def _print_fields(comparison: Comparison, fields: Sequence[Mapping[str, Any]], form: Form) -> None:
    """Print the fields of the runs, if any has one."""
    if names := dict.fromkeys(name for row in fields for name in row):
        rows = [[name, *(str(row.get(name, "-")) for row in fields)] for name in names]
        _print(table(["", *_names(comparison)], rows), form)


def print_groups(
    store: RunStore, names: Sequence[str], key: str, metrics: list[str], form: Form, as_json: bool
) -> None:
    """Print statistics of groups of runs."""
    from rlctl.plugins.console.group_statistics import GroupedRuns
    from rlctl.sweeps.results import runs_of
    from rlctl.sweeps.selection import find_compared, whole_sweep

    found: list[Run] = []
    for name in names:
        if (sweep := whole_sweep(store, name)) is not None:
            found += runs_of(sweep)
        else:
            found += find_compared(store, [name])
    grouped = GroupedRuns.of(list({run.path: run for run in found}.values()), key, metrics)
    if as_json:
        print_json(grouped.as_json())
        return
    columns = ["metric", key, "n", "mean", "95 % interval", "min", "max"]
    _print(table(columns, grouped.rows(), right=columns[2:]), form)
    for pairs in grouped.pairs():
        difference = pairs.differences
        first, second = pairs.groups
        half = difference.half
        p = difference.p_value()
        if half is None or p is None:  # of one pair
            continue
        low = difference.mean - half
        high = difference.mean + half
        notice(
            f"{pairs.metric}: {second} − {first} is {difference.mean:.4g}, 95 % interval "
            f"{low:.4g} to {high:.4g}, p = {p:.3g} (paired t-test, "
            f"{len(difference.values)} pairs)"
        )


_WITH_BEST = ("val-core/", "critic/score", "train/loss")


def print_comparison(comparison: Comparison, changed: bool, form: Form) -> None:
    """Print the settings and the most important metrics; `changed`: only differences were kept."""
    names = _names(comparison)
    seeds = _differ_in_seeds(comparison)
    if comparison.settings:
        rows = [[key, *map(short, row)] for key, row in comparison.settings.items()]
        _print(table(["setting", *names], rows), form)
    elif changed:
        notice("the runs have the same settings")
    shown = [name for name in comparison.metrics if name.startswith("val-core/")]
    shown += [name for name in SHOWN_METRICS if name in comparison.metrics]
    figure = _exact if form == "csv" else percent_or_number
    rows = [row for metric in shown for row in _metric_rows(comparison, metric, seeds, figure)]
    if rows:
        if comparison.settings:
            stdout().print()
        columns = [*names]
        if seeds:
            columns += ["mean", "std"]
        _print(table(["metric", "", "step", *columns], rows, right=["step", *columns]), form)
    hidden = len(comparison.metrics) - len(shown)
    if hidden:
        notice(f"{hidden} more metrics: --json prints all, --metric NAME prints one step by step")


def print_curves(comparison: Comparison, metrics: Sequence[str], form: Form) -> None:
    """Print one table per metric, with a row per step."""
    names = _names(comparison)
    figure = _exact if form == "csv" else _rounded
    for metric in metrics:
        rows = [
            [str(step), *(figure(metric, value) for value in values)]
            for step, values in comparison.curves[metric].items()
        ]
        _print(table([metric, *names], rows, right=names), form)


def _exact(metric: str, value: float | None) -> str:
    return "" if value is None else repr(value)


def _rounded(metric: str, value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _metric_rows(
    comparison: Comparison, metric: str, seeds: bool, figure: Figure
) -> list[list[str]]:
    row = comparison.metrics[metric]
    step = "-" if row.step is None else str(row.step)
    rows = [[metric, "at step", step, *_figures(metric, row.at, seeds, figure)]]
    if list(row.last) != list(row.at):
        rows.append(["", "at the end", "", *_figures(metric, row.last, seeds, figure)])
    if metric.startswith(_WITH_BEST):
        best = _figures(metric, row.best, seeds, figure)
        for place, step in enumerate(row.best_step):
            if step is not None:
                best[place] += f" @{step}"
        rows.append(["", "best", "", *best])
    return rows


def _figures(metric: str, values: Sequence[float | None], seeds: bool, figure: Figure) -> list[str]:
    """Return the values as text; with `seeds` also their mean and standard deviation."""
    shown = [figure(metric, value) for value in values]
    known = [value for value in values if value is not None]
    if seeds:
        has_spread = len(known) > 1
        shown.append(figure(metric, mean(known) if has_spread else None))
        shown.append(figure(metric, stdev(known) if has_spread else None))
    return shown


def _differ_in_seeds(comparison: Comparison) -> bool:
    """Return True if the runs have the same settings apart from their names and seeds."""
    differing = {
        key
        for key, values in comparison.settings.items()
        if any(value != values[0] for value in values) and key != "trainer.experiment_name"
    }
    return bool(differing) and all(key.rpartition(".")[2] == "seed" for key in differing)


def _print(built: Table, form: Form) -> None:
    """Print a table, or the same cells in another form."""
    if form == "table":
        stdout().print(built)
    else:
        sys.stdout.write(FORMS[form](cells(built)))


def _names(comparison: Comparison) -> list[str]:
    """Return the names of the runs, with their projects if two runs share a name."""
    short_names = [run.partition("/")[2] for run in comparison.runs]
    if len(set(short_names)) < len(short_names):
        return list(comparison.runs)
    return short_names
