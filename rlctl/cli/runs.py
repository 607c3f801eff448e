"""`rlctl runs` and `rlctl show`: the registry of runs, and one run of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.cli import complete

app = typer.Typer(add_completion=False)
registry = typer.Typer(add_completion=False, invoke_without_command=True)
app.add_typer(registry, name="runs")

Root = Annotated[
    Path | None, typer.Option("--root", envvar="RLCTL_RUNS", help="The folder of all runs.  [default: runs]", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="As JSON on stdout.")]
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's name or the beginning of it, its folder, @last or @failed.", autocompletion=complete.run),
]
State = Literal["starting", "running", "finished", "failed", "stopped", "lost", "broken"]


@registry.callback()
def runs(
    ctx: typer.Context,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many at most.")] = 20,
    every: Annotated[bool, typer.Option("--all", "-a", help="All of them, whatever --number says.")] = False,
    state: Annotated[State | None, typer.Option("--state", help="Only runs in this state.")] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """List the runs, running and newest first."""
    if ctx.invoked_subcommand is not None:
        return
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


_SYNC_EXAMPLES = """
Examples:

  rlctl runs sync @last --logger wandb              what a logger missed while it was switched off

  rlctl runs sync ppo-261121 -l tensorboard         a logger that the run did not have gets the whole run
"""


@registry.command(epilog=_SYNC_EXAMPLES)
def sync(
    run: RunName,
    logger: Annotated[list[str], typer.Option("--logger", "-l", help="The tracker; repeat for several.", autocompletion=complete.logger)],
    first: Annotated[int | None, typer.Option("--from", min=0, help="Send every step from this one on, missed or not.")] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Send trackers what they missed of a run that has ended, from its own record."""
    import dataclasses

    from rlctl.cli.console import notice, print_json
    from rlctl.runs import sync as syncing
    from rlctl.runs.store import RunStore

    found = RunStore.at(root).find(run)
    sent = [syncing.sync(found, name, first) for name in dict.fromkeys(logger)]
    if as_json:
        print_json([dataclasses.asdict(each) for each in sent])
        return
    for each in sent:
        known = f" (as {each.id})" if each.id else ""
        notice(f"{each.logger}{known}: {f'{each.num_steps} steps sent' if each.num_steps else 'nothing is missing'}")


_SHOW_EXAMPLES = """
Examples:

  rlctl show @last

  rlctl show @last --samples --wrong --grep apples

  rlctl show ppo-a --step 20 --json
"""


@app.command(epilog=_SHOW_EXAMPLES)
def show(
    run: RunName,
    samples: Annotated[bool, typer.Option("--samples", help="Print validation samples instead.")] = False,
    step: Annotated[int | None, typer.Option("--step", min=0, help="The samples of this step instead of the last.")] = None,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only wrong answers.")] = False,
    right: Annotated[bool, typer.Option("--right", help="Only right answers.")] = False,
    grep: Annotated[str | None, typer.Option("--grep", metavar="TEXT", help="Only samples that hold this text.")] = None,
    number: Annotated[int | None, typer.Option("-n", "--number", min=1, help="How many samples at most.  [default: all]")] = None,
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
    if not (samples or wrong or right or grep or step is not None):
        print_json(details.details(found)) if as_json else print_run(found)
        return
    at, chosen = details.samples(found, step, right if wrong or right else None, grep)
    if as_json:
        print_json({"step": at, "samples": [dataclasses.asdict(sample) for sample in chosen[:number]]})
    else:
        print_samples(at, chosen, number, grep)
