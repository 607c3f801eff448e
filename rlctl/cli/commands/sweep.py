"""`rlctl sweep`: many runs on one cluster, and what came of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from rlctl.cli import complete, remote
from rlctl.cli.commands.runs import Json, Root
from rlctl.cli.commands.train import RecipeOption, starting_recipe
from rlctl.cli.remote import Address, Detach

_VERBS = {"ppo": "PPO", "grpo": "GRPO", "sft": "supervised fine-tuning"}


class _Group(TyperGroup):
    """`rlctl sweep --recipe X key=…` names no verb: it is PPO's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else "--help"
        if (
            first not in self.commands
            and first not in ("--help", "-h")
            and ("=" in first or first.startswith("-"))
        ):
            args = ["ppo", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    add_completion=False, cls=_Group, help="Search settings with many runs on one cluster."
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OVERRIDES]...",
        help="Overrides in Hydra's grammar. Several values are searched: key=1,2, range(1,4), interval(0,1), tag(log,interval(…)).",
        autocompletion=complete.override,
    ),
]
Sampler = Annotated[
    Literal["grid", "random", "tpe", "cmaes"] | None,
    typer.Option(
        "--sampler", help="Every combination, or values drawn by Optuna.", show_default="grid"
    ),
]
Trials = Annotated[
    int | None,
    typer.Option("--trials", "-n", min=1, help="How many trials.", show_default="all of a grid"),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="What a trial is judged by.",
        show_default="the runs' first validation metric",
    ),
]
Mode = Annotated[
    Literal["max", "min"] | None,
    typer.Option("--mode", help="Whether more or less of it is better.", show_default="max"),
]
Pruner = Annotated[
    Literal["none", "median", "hyperband"] | None,
    typer.Option(
        "--pruner", help="Which rule stops trials early, after a validation.", show_default="none"
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        "--parallel",
        "-j",
        min=1,
        help="Runs at once.",
        show_default="what the cluster has room for",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        min=1,
        help="Runs of each trial with consecutive seeds; the trial's value is their mean.",
        show_default="1",
    ),
]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Name of the sweep; by default recipe, date and three letters."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="List the trials and what they need: no process, no file.")
]

_EXAMPLES = """
Examples:

  rlctl sweep {verb} actor_rollout_ref.actor.optim.lr=1e-4,3e-4,1e-3

  rlctl sweep {verb} 'actor_rollout_ref.actor.optim.lr=tag(log,interval(1e-5,1e-3))' --sampler tpe --trials 20 --pruner hyperband

  rlctl sweep {verb} algorithm.gamma=0.99,1.0 --seeds 3 --dry-run
"""


def _add(verb: str, help: str) -> None:
    @app.command(verb, help=help, epilog=_EXAMPLES.format(verb=verb))
    def command(
        overrides: Overrides = None,
        recipe: RecipeOption = None,
        sampler: Sampler = None,
        trials: Trials = None,
        metric: Metric = None,
        mode: Mode = None,
        pruner: Pruner = None,
        parallel: Parallel = None,
        seeds: Seeds = None,
        name: Name = None,
        dry_run: DryRun = False,
        as_json: Json = False,
        address: Address = None,
        detach: Detach = False,
    ) -> None:
        options = _options(
            sampler=sampler,
            trials=trials,
            metric=metric,
            mode=mode,
            pruner=pruner,
            parallel=parallel,
            seeds=seeds,
        )
        source = starting_recipe(verb, overrides or [], recipe)
        settings = [
            *(overrides or []),
            *options,
            *([f"trainer.experiment_name={name}"] if name else []),
        ]
        if address is None:
            _sweep(verb, source, settings, dry_run, as_json)
        else:
            _submit(verb, source, settings, address, detach)


for each, algorithm in _VERBS.items():
    _add(each, f"Search the settings of {algorithm}.")


@app.command()
def best(
    sweep: Annotated[str, typer.Argument(help="A sweep's name or the beginning of it, or @last.")],
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write the winner as a recipe.")
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Show the best trial of a sweep, and write it as a recipe.

    Example: rlctl sweep best @last --export best.yaml && rlctl train ppo --recipe best.yaml
    """
    from rlctl.cli.console import notice, print_json
    from rlctl.cli.views import sweep as sweep_view
    from rlctl.runs.store import DEFAULT_ROOT
    from rlctl.sweeps import results
    from rlctl.sweeps.record import find_sweep

    found = find_sweep(root or DEFAULT_ROOT, sweep)
    winner = results.best(found)
    if export is not None:
        results.export(found, winner, export)
        notice(f"{export} is a recipe: `rlctl train {found.record.verb} --recipe {export}`")
    print_json(results.plain(winner)) if as_json else sweep_view.print_best(found, winner)


def _options(**given: Any) -> list[str]:
    """What the options say, as overrides of the section `sweep`."""
    return [f"sweep.{name}={value}" for name, value in given.items() if value is not None]


def _sweep(verb: str, source: str, settings: list[str], dry_run: bool, as_json: bool) -> None:
    from rlctl import api
    from rlctl.cli.views import sweep as sweep_view
    from rlctl.errors import UsageError
    from rlctl.sweeps.plan import make_sweep_plan

    if as_json and not dry_run:
        raise UsageError(
            "--json goes with --dry-run",
            hint="`rlctl show SWEEP --json` shows what came of a sweep",
        )
    if dry_run:
        sweep_view.print_plan(make_sweep_plan(verb, source, settings), as_json)
        return
    with sweep_view.live() as view:
        done = api.sweep(source, settings, verb=verb, view=view)
    sweep_view.print_sweep(done.sweep)


def _submit(verb: str, source: str, settings: list[str], address: str, detach: bool) -> None:
    """As a job: what can be judged here is the grammar and the shared part of the configuration; the rest is judged on the cluster."""
    from rlctl.recipes.axes import split_axes
    from rlctl.recipes.compose import compose

    fixed, _ = split_axes(settings, source)
    remote.submit(
        address, detach, ["sweep", verb, "--recipe", source, *settings], compose(source, fixed)
    )
