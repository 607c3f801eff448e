"""`rlctl runs` and `rlctl show`: the registry of runs, and one run of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.cli import complete

app = typer.Typer(add_completion=False)

Root = Annotated[
    Path | None, typer.Option("--root", envvar="RLCTL_RUNS", help="The folder of all runs.  [default: runs]", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="As JSON on stdout.")]
State = Literal["starting", "running", "finished", "failed", "stopped", "lost", "broken"]


@app.command()
def runs(
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many at most.")] = 20,
    every: Annotated[bool, typer.Option("--all", "-a", help="All of them, whatever --number says.")] = False,
    state: Annotated[State | None, typer.Option("--state", help="Only runs in this state.")] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """List the runs, running and newest first."""
    from rlctl.cli.console import print_json
    from rlctl.cli.runs_view import print_runs
    from rlctl.runs.details import overview
    from rlctl.runs.store import RunStore

    store = RunStore.at(root)
    found = [run for run in store.runs() if state in (None, run.state)]
    shown = found if every else found[:number]
    if as_json:
        print_json([overview(run) for run in shown])
    else:
        print_runs(shown, hidden=len(found) - len(shown), root=store.root)


@app.command()
def show(
    run: Annotated[
        str, typer.Argument(help="A run's name or the beginning of it, its folder, @last or @failed.", autocompletion=complete.run)
    ],
    samples: Annotated[bool, typer.Option("--samples", help="Print validation samples instead.")] = False,
    step: Annotated[int | None, typer.Option("--step", min=0, help="The samples of this step instead of the last.")] = None,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only wrong answers.")] = False,
    right: Annotated[bool, typer.Option("--right", help="Only right answers.")] = False,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many samples at most.")] = 5,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Show one run: its curves, its settings, its validation samples."""
    import dataclasses

    from rlctl.cli.console import print_json
    from rlctl.cli.runs_view import print_run, print_samples
    from rlctl.cli.sweep_view import show_sweep
    from rlctl.errors import UsageError
    from rlctl.runs import details
    from rlctl.runs.store import RunStore
    from rlctl.sweeps.record import names_sweep

    store = RunStore.at(root)
    if names_sweep(store.root, run):
        show_sweep(store.root, run, as_json)
        return
    if wrong and right:
        raise UsageError("--wrong and --right exclude each other", hint="leave out both to see all")
    found = store.find(run)
    if not (samples or wrong or right or step is not None):
        print_json(details.details(found)) if as_json else print_run(found)
        return
    at, chosen = details.samples(found, step, right if wrong or right else None)
    if as_json:
        print_json({"step": at, "samples": [dataclasses.asdict(sample) for sample in chosen]})
    else:
        print_samples(at, chosen, number)
