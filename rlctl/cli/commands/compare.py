"""`rlctl compare`: settings and metrics of several runs, side by side."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rlctl.cli.options import Json, Root, RunNames

app = typer.Typer(add_completion=False)

_EXAMPLES = """
Examples:

  rlctl compare ppo-261121 grpo-261121 --changed

  rlctl compare @last @best:val-core/gsm8k/acc/mean@1

  rlctl compare a b --metric critic/score/mean        one metric, step by step

  rlctl compare seed-1 seed-2 seed-3 --format markdown
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
    form: Annotated[
        Literal["table", "csv", "markdown"],
        typer.Option("--format", help="Print the tables in this form."),
    ] = "table",
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Compare the settings of runs, and their metrics at the same step.

    Runs that differ only in their seeds get a column with mean and standard deviation. Given one
    sweep, show its trials, best first, and the importance of each parameter.
    """
    from rlctl import api
    from rlctl.cli.console import print_json
    from rlctl.cli.views.compare import print_comparison, print_curves
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
                f"no metric {name!r} differs between the runs"
                if changed
                else f"no run has a metric {name!r}"
            )
    if as_json:
        print_json(comparison.as_json())
    elif metrics:
        print_curves(comparison, metrics, form)
    else:
        print_comparison(comparison, changed, form)
