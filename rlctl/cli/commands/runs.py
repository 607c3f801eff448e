"""`rlctl runs` and `rlctl show`: the registry of runs, and one run of it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rlctl.cli import complete
from rlctl.cli.commands import runs_manage
from rlctl.cli.options import Json, Root, RunName

app = typer.Typer(add_completion=False)
registry = typer.Typer(add_completion=False, invoke_without_command=True)
app.add_typer(registry, name="runs")
registry.add_typer(runs_manage.app)

State = Literal["starting", "running", "finished", "failed", "stopped", "lost", "broken"]

_EXAMPLES = """
Examples:

  rlctl runs --where 'state == "finished" and best(val-core/gsm8k/acc/mean@1) > 0.5'

  rlctl runs --sort -best --cols +actor_rollout_ref.actor.optim.lr,trainer.seed

  rlctl runs --where '"baseline" in tags and like(recipe, "gsm8k*") and not created < "2026-11-01"'

A name is a field (name, project, state, created, took, recipe, tags, note, exit_code, step, total_steps, first, last, best, tokens, …),
a metric or a key of the configuration. Of a metric it is the last value; best(…), first(…), min(…) and max(…) are others. What a run
lacks is null.
"""


@registry.callback(epilog=_EXAMPLES)
def runs(
    ctx: typer.Context,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many at most.")] = 20,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="All of them, whatever --number says.")
    ] = False,
    state: Annotated[State | None, typer.Option("--state", help="Only runs in this state.")] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="EXPR", help="Only runs that this is true of; see below."),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option("--sort", metavar="KEY", help="Order by this value; `-KEY`: greatest first."),
    ] = None,
    cols: Annotated[
        str | None,
        typer.Option(
            "--cols", metavar="KEY,…", help="Show these values; `+KEY,…`: beside the usual."
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Draw the list anew every two seconds, until Ctrl-C."),
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """List the runs, running and newest first; remove, restore, tag them."""
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from rlctl.cli.console import print_json
    from rlctl.cli.views import runs as runs_view
    from rlctl.runs.listing import RunQuery
    from rlctl.runs.store import RunStore

    store = RunStore.at(root)
    listing = RunQuery(state, where, sort, cols, None if every else number)
    if watch:
        runs_view.watch_runs(listing, store, as_json)
    elif as_json:
        print_json(listing.page(store).as_json())
    else:
        runs_view.print_runs(listing.page(store), store.root)


def _refuse_options(ctx: typer.Context) -> None:
    """`rlctl runs --root DIR rm …` would look elsewhere than it says: options of the list stand behind no command of the family."""
    given = [
        name
        for name in ctx.params
        if (source := ctx.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]
    if given:
        from rlctl.errors import UsageError

        command = ctx.invoked_subcommand
        raise UsageError(
            f"--{given[0]} stands before {command!r}, but belongs to the list",
            hint=f"rlctl runs {command} … --{given[0]} …",
        )


_SYNC_EXAMPLES = """
Examples:

  rlctl runs sync @last --logger wandb              what a logger missed while it was switched off

  rlctl runs sync ppo-261121 -l tensorboard         a logger that the run did not have gets the whole run
"""


@registry.command(epilog=_SYNC_EXAMPLES)
def sync(
    run: RunName,
    logger: Annotated[
        list[str],
        typer.Option(
            "--logger",
            "-l",
            help="The tracker; repeat for several.",
            autocompletion=complete.logger,
        ),
    ],
    first: Annotated[
        int | None,
        typer.Option("--from", min=0, help="Send every step from this one on, missed or not."),
    ] = None,
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
        notice(
            f"{each.logger}{known}: {f'{each.num_steps} steps sent' if each.num_steps else 'nothing is missing'}"
        )


_SHOW_EXAMPLES = """
Examples:

  rlctl show @last

  rlctl show @last --samples --wrong --grep apples

  rlctl show ppo-a --step 20 --json
"""


@app.command(epilog=_SHOW_EXAMPLES)
def show(
    run: RunName,
    samples: Annotated[
        bool, typer.Option("--samples", help="Print validation samples instead.")
    ] = False,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="The samples of this step instead of the last."),
    ] = None,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only wrong answers.")] = False,
    right: Annotated[bool, typer.Option("--right", help="Only right answers.")] = False,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="TEXT", help="Only samples that hold this text.")
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("-n", "--number", min=1, help="How many samples at most.  [default: all]"),
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Show one run: its curves, its settings, its validation samples."""
    import dataclasses

    from rlctl.api import find_run_or_sweep
    from rlctl.cli.console import print_json
    from rlctl.cli.views.runs import print_run, print_samples
    from rlctl.cli.views.sweep import show_sweep
    from rlctl.errors import UsageError
    from rlctl.runs import details
    from rlctl.sweeps.record import SweepDir

    found = find_run_or_sweep(run, root)
    if isinstance(found, SweepDir):
        show_sweep(found, as_json)
        return
    if wrong and right:
        raise UsageError("--wrong and --right exclude each other", hint="leave out both to see all")
    if not (samples or wrong or right or grep or step is not None):
        print_json(details.details(found)) if as_json else print_run(found)
        return
    at, chosen = details.samples(found, step, right if wrong or right else None, grep)
    if as_json:
        print_json(
            {"step": at, "samples": [dataclasses.asdict(sample) for sample in chosen[:number]]}
        )
    else:
        print_samples(at, chosen, number, grep)
