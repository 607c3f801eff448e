"""`rlctl runs`, `sweeps` and `show`: the lists of runs and sweeps, and the details of one."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rlctl.cli import PluginGroup
from rlctl.cli.console import print_json
from rlctl.cli.options import Json, Root, RunName
from rlctl.cli.table_forms import Format
from rlctl.errors import UsageError
from rlctl.runs.naming import DEFAULT_ROOT
from rlctl.runs.store import RunStore


class _RunsGroup(PluginGroup):
    """Group `rlctl runs`, whose commands are plug-ins."""

    kind = "commands.runs"


app = typer.Typer()
registry = typer.Typer(cls=_RunsGroup, invoke_without_command=True)
app.add_typer(registry, name="runs")

State = Literal["starting", "running", "finished", "failed", "stopped", "lost", "broken"]

_EXAMPLES = """
Examples:

  rlctl runs --where 'like(recipe, "gsm*") and best(critic/score/mean) > 0.5'

  rlctl runs --sort -best --cols +algorithm.lam,trainer.seed

  rlctl runs --where '"baseline" in tags and not created < "2026-11-01"'

A name in EXPR is a field (name, project, state, created, took, recipe, tags, note, exit_code, \
step, total_steps, first, last, best, tokens, …), a metric or a key of the configuration. \
A metric is its last value; best(…), first(…), min(…) and max(…) select others. \
Missing values are null.
"""


@registry.callback(epilog=_EXAMPLES)
def runs(
    ctx: typer.Context,
    number: Annotated[
        int, typer.Option("-n", "--number", min=1, help="Maximum number of runs.")
    ] = 20,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="List all runs; overrides --number.")
    ] = False,
    state: Annotated[
        State | None, typer.Option("--state", help="List only runs in this state.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="EXPR", help="List only runs that match; see below."),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort", metavar="KEY", help="Sort by this value; `-KEY` sorts in descending order."
        ),
    ] = None,
    cols: Annotated[
        str | None,
        typer.Option(
            "--cols",
            metavar="KEY,…",
            help="Show these columns; `+KEY,…` adds them to the usual ones.",
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Refresh the list every two seconds until Ctrl-C."),
    ] = False,
    root: Root = None,
    form: Format = "table",
    as_json: Json = False,
) -> None:
    """List runs, or remove, prune, restore and tag them.

    Active runs come first, then the newest.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from rlctl.cli.views import runs as runs_view
    from rlctl.runs.listing import RunQuery

    store = RunStore(root)
    limit = number
    if every:
        limit = None
    listing = RunQuery(state, where, sort, cols, limit)
    if watch:
        runs_view.watch_runs(listing, store, as_json)
    elif as_json or form == "json":
        print_json(listing.page(store.runs()).as_json())
    else:
        runs_view.print_runs(listing.page(store.runs()), store.root)


def _refuse_options(ctx: typer.Context) -> None:
    """Raise UsageError for list options before a subcommand, such as `rlctl runs --root DIR rm`.

    The subcommand would ignore them.
    """
    given = [
        name
        for name in ctx.params
        if (source := ctx.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]
    if given:
        command = ctx.invoked_subcommand
        raise UsageError(
            f"--{given[0]} before {command!r} has no effect",
            hint=f"rlctl runs {command} … --{given[0]} …",
        )


_SHOW_EXAMPLES = """
Examples:

  rlctl show @last

  rlctl show @last --samples --wrong --grep apples

  rlctl show @last --samples --train --wrong    of the last training step

  rlctl show ppo-a --step 20 --json
"""


@app.command(epilog=_SHOW_EXAMPLES)
def show(
    run: RunName,
    samples: Annotated[
        bool, typer.Option("--samples", help="Print validation samples instead.")
    ] = False,
    train: Annotated[
        bool,
        typer.Option("--train", help="Print responses that the run has learned from instead."),
    ] = False,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="Print the samples of this step; by default the last."),
    ] = None,
    wrong: Annotated[bool, typer.Option("--wrong", help="Print only wrong responses.")] = False,
    right: Annotated[bool, typer.Option("--right", help="Print only right responses.")] = False,
    grep: Annotated[
        str | None,
        typer.Option("--grep", metavar="TEXT", help="Print only samples with this text."),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("-n", "--number", min=1, help="Maximum number of samples; by default all."),
    ] = None,
    root: Root = None,
    form: Format = "table",
    as_json: Json = False,
) -> None:
    """Show the curves, settings and validation samples of a run."""

    as_json = as_json or form == "json"
    from rlctl.api import find_run_or_sweep
    from rlctl.cli.views.run_page import print_run
    from rlctl.cli.views.samples import print_samples
    from rlctl.cli.views.sweep import show_sweep
    from rlctl.runs import details
    from rlctl.sweeps.sweep_record import SweepDir
    from rlctl.tracking.jsonl import TRAINED, VALIDATED

    found = find_run_or_sweep(run, root)
    if isinstance(found, SweepDir):
        show_sweep(found, as_json)
        return
    if wrong and right:
        raise UsageError("--wrong and --right exclude each other", hint="leave out both to see all")
    if not (samples or train or wrong or right or grep or step is not None):
        if as_json:
            print_json(details.details(found))
        else:
            print_run(found)
        return
    kind = TRAINED if train else VALIDATED
    verdict = None
    if wrong or right:
        verdict = right
    at, chosen = details.samples(found, step, verdict, grep, kind)
    if as_json:
        print_json({"step": at, "samples": chosen[:number]})
    else:
        print_samples(at, chosen, number, grep)


@app.command(epilog="Example: rlctl sweeps --json")
def sweeps(root: Root = None, form: Format = "table", as_json: Json = False) -> None:
    """List the sweeps, newest first."""
    from rlctl.cli.views import sweep as sweep_view
    from rlctl.sweeps import results, sweep_record

    found = [results.overview(sweep) for sweep in sweep_record.sweeps(root or DEFAULT_ROOT)]
    if as_json or form == "json":
        print_json(found)
    else:
        sweep_view.print_sweeps(found)
