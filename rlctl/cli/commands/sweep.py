"""`rlctl sweep`: search for settings with many runs on one cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from rlctl.cli import address_option
from rlctl.cli.address_option import Address, Detach, Slurm
from rlctl.cli.commands.train import (
    Logger,
    RecipeOption,
    check_algorithm,
    common_settings,
    loggers,
    starting_recipe,
)
from rlctl.cli.console import print_json
from rlctl.cli.options import DryRunJson, Json, Root, overrides_argument
from rlctl.cli.startup import announce
from rlctl.cli.stderr import notice
from rlctl.errors import UsageError
from rlctl.owner import command
from rlctl.recipes.search_path import DEFAULT, MODEL, verbs
from rlctl.runs.naming import DEFAULT_ROOT

if TYPE_CHECKING:
    from rlctl.recipes.compose import Recipe


class _Group(TyperGroup):
    """Command group with a default verb, as in `rlctl sweep --recipe X key=…`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default verb before options and overrides."""
        first = next(iter(args), "--help")
        is_option = first.startswith("-") and first not in ("--help", "-h")
        if first not in self.commands and (is_option or "=" in first):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Group)

Overrides = Annotated[
    list[str] | None,
    overrides_argument(
        "Overrides in Hydra's grammar. Axes of the search: key=1,2, range(1,4), "
        "interval(0,1), tag(log,interval(…)).",
        "[OVERRIDES]...",
    ),
]
Sampler = Annotated[
    Literal["grid", "random", "tpe", "cmaes"] | None,
    typer.Option(
        "--sampler", help="Try every combination, or let Optuna draw values.", show_default="grid"
    ),
]
Trials = Annotated[
    int | None,
    typer.Option("--trials", "-n", min=1, help="Number of trials.", show_default="all of a grid"),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="Metric to optimize.",
        show_default="the runs' first validation metric",
    ),
]
Mode = Annotated[
    Literal["max", "min"] | None,
    typer.Option("--mode", help="Maximize or minimize the metric.", show_default="max"),
]
Pruner = Annotated[
    Literal["none", "median", "hyperband"] | None,
    typer.Option(
        "--pruner", help="Rule that stops trials early, after a validation.", show_default="none"
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        "--parallel",
        "-j",
        min=1,
        help="Maximum number of concurrent runs.",
        show_default="as many as fit on the cluster",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        min=1,
        help="Runs per trial, with consecutive seeds, also of the data order unless data.seed=N is "
        "given; the trial's value is their mean.",
        show_default="1",
    ),
]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Name of the sweep; by default recipe, date and three letters."),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="List the trials and their resources; start no process, write no file."
    ),
]

_EXAMPLES = """
Examples:

  rlctl sweep {verb} actor_rollout_ref.actor.optim.lr=1e-4,3e-4,1e-3

  rlctl sweep {verb} --sampler tpe --trials 20 --pruner hyperband \\
    'actor_rollout_ref.actor.optim.lr=tag(log,interval(1e-5,1e-3))'

  rlctl sweep {verb} actor_rollout_ref.actor.grad_clip=0.5,1.0 \\
    --seeds 3 --dry-run
"""


def _add(verb: str, help: str) -> None:
    @app.command(verb, help=help, epilog=_EXAMPLES.format(verb=verb))
    def command(
        context: typer.Context,
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
        logger: Logger = None,
        dry_run: DryRun = False,
        as_json: DryRunJson = False,
        address: Address = None,
        detach: Detach = False,
        slurm: Slurm = None,
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
        if address_option.launched(context, slurm, detach):
            return
        address_option.check_options(address, dry_run or as_json)
        announce("checking the configuration")
        source = starting_recipe(verb, overrides or [], recipe)
        settings = [*common_settings(overrides, name), *loggers(logger), *options]
        if recipe is not None and verb != DEFAULT:  # which may not have been given
            check_algorithm(verb, recipe, _compose_first(source, settings))
        if address is None:
            _sweep(verb, source, settings, dry_run, as_json)
        else:  # the cluster checks the trials
            words = ["sweep", verb, "--recipe", source, *settings]
            from rlctl.cli.remote_jobs import submit

            submit(address, detach, words, _compose_first(source, settings))


for verb, facts in verbs().items():
    if facts.model == MODEL:  # a policy is trained
        _add(verb, f"Search settings of `rlctl train {verb}`.")


_BEST_EXAMPLE = """
Example: rlctl sweep best @last --export best.yaml && rlctl train ppo --recipe best.yaml
"""


@app.command(epilog=_BEST_EXAMPLE)
def best(
    sweep: Annotated[str, typer.Argument(help="Sweep by name or prefix, or @last.")],
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", metavar="FILE", help="Write the best trial's settings as a recipe."
        ),
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Show the best trial of a sweep, or export it as a recipe."""
    from rlctl.cli.views import sweep as sweep_view
    from rlctl.sweeps import results
    from rlctl.sweeps.sweep_record import find_sweep

    found = find_sweep(root or DEFAULT_ROOT, sweep)
    winner = results.best(found)
    if export is not None:
        results.export(found, winner, export)
        notice(f"wrote {export}; train with `rlctl train {found.record.verb} --recipe {export}`")
    if as_json:
        print_json(winner)
    else:
        sweep_view.print_best(found, winner)


def _options(**given: Any) -> list[str]:
    """Return the given options as overrides of the section `sweep`."""
    return [f"sweep.{name}={value}" for name, value in given.items() if value is not None]


def _sweep(verb: str, source: str, settings: list[str], dry_run: bool, as_json: bool) -> None:
    from rlctl.cli.views import sweep as sweep_view
    from rlctl.sweeps.sweep_plan import make_sweep_plan

    if as_json and not dry_run:
        raise UsageError(
            "--json needs --dry-run",
            hint="`rlctl show SWEEP --json` prints the results of a sweep",
        )
    if dry_run:
        sweep_view.print_plan(make_sweep_plan(verb, source, settings), as_json)
        return
    from rlctl import api

    with command(), sweep_view.live() as view:
        done = api.sweep(source, settings, verb=verb, view=view)
    sweep_view.print_sweep(done.sweep)


def _compose_first(source: str, settings: list[str]) -> Recipe:
    """Compose the settings of the first trial."""
    from rlctl.recipes.axes import split_axes, with_first_values
    from rlctl.recipes.compose import compose

    return compose(source, with_first_values(*split_axes(settings, source)))
