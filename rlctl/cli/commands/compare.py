"""`rlctl compare`: runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.options import Json, Root, RunNames

if TYPE_CHECKING:
    from rlctl.runs.compare import Comparison

app = typer.Typer(add_completion=False)

_EXAMPLES = """
Examples:

  rlctl compare ppo-261121 grpo-261121 --changed

  rlctl compare @last @best:val-core/gsm8k/acc/mean@1

  rlctl compare a b --metric critic/score/mean        one metric, step by step
"""


@app.command(epilog=_EXAMPLES)
def compare(
    runs: RunNames,
    changed: Annotated[
        bool,
        typer.Option("--changed", help="Only settings and metrics that differ between the runs."),
    ] = False,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", "-m", metavar="METRIC", help="Show this metric step by step."),
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Compare runs: their settings, and their metrics at the same step.

    Of one sweep: its trials, best first, and what explains their values.
    """
    import dataclasses

    from rlctl import api
    from rlctl.cli.console import print_json
    from rlctl.cli.views.sweep import show_sweep
    from rlctl.errors import NotFoundError
    from rlctl.sweeps.record import SweepDir

    if len(runs) == 1 and isinstance(sweep := api.find_run_or_sweep(runs[0], root), SweepDir):
        show_sweep(sweep, as_json)
        return
    comparison = api.compare(runs, changed=changed, root=root)
    for name in metrics or []:
        if name not in comparison.curves:
            raise NotFoundError(
                f"no run has a metric {name!r}"
                if not changed
                else f"no metric {name!r} differs between the runs"
            )
    if as_json:
        print_json(dataclasses.asdict(comparison))
    elif metrics:
        _print_curves(comparison, metrics)
    else:
        _print(comparison, changed)


def _print(comparison: Comparison, changed: bool) -> None:
    from rlctl.cli.console import notice, stdout, table
    from rlctl.cli.views.runs import SHOWN_METRICS, short
    from rlctl.monitoring.text import percent_or_number

    names = _names(comparison)
    if comparison.settings:
        rows = [[key, *map(short, row)] for key, row in comparison.settings.items()]
        stdout().print(table(["setting", *names], rows))
    elif changed:
        notice("the runs have the same settings")
    shown = [name for name in comparison.metrics if name.startswith("val-core/")]
    shown += [name for name in SHOWN_METRICS if name in comparison.metrics]
    rows = []
    for metric in shown:
        row = comparison.metrics[metric]

        def text(value: float | None, metric: str = metric) -> str:
            return percent_or_number(metric, value)

        rows.append(
            [metric, "at step", "-" if row.step is None else str(row.step), *map(text, row.at)]
        )
        rows.append(["", "at the end", "", *map(text, row.last)])
        if metric.startswith(("val-core/", "critic/score", "train/loss")):
            steps = ["" if step is None else f" @{step}" for step in row.best_step]
            rows.append(
                [
                    "",
                    "best",
                    "",
                    *(f"{text(value)}{step}" for value, step in zip(row.best, steps, strict=True)),
                ]
            )
    if rows:
        stdout().print()
        stdout().print(table(["metric", "", "step", *names], rows, right=["step", *names]))
    hidden = len(comparison.metrics) - len(shown)
    if hidden:
        notice(f"{hidden} more metrics; --json has them all, --metric NAME shows one step by step")


def _print_curves(comparison: Comparison, metrics: list[str]) -> None:
    from rlctl.cli.console import stdout, table

    names = _names(comparison)
    for metric in metrics:
        rows: list[list[Any]] = [
            [str(step), *("-" if value is None else f"{value:.5g}" for value in row)]
            for step, row in comparison.curves[metric].items()
        ]
        stdout().print(table([metric, *names], rows, right=names))


def _names(comparison: Comparison) -> list[str]:
    """The runs' names, with their projects where two are called the same."""
    short = [run.partition("/")[2] for run in comparison.runs]
    return short if len(set(short)) == len(short) else list(comparison.runs)
