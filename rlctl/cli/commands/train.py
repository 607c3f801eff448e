"""`rlctl train`: training with a recipe; one command per algorithm family."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli import address_option, complete
from rlctl.cli.address_option import Address, Detach, Slurm
from rlctl.cli.limit_options import MaxTime, Retries, SaveBy
from rlctl.cli.options import RUNS_VARIABLE, DryRunJson, Strict, overrides_argument, recipe_option
from rlctl.cli.startup import announce, compose_with_notices, problems_as_json, until_start
from rlctl.cli.stderr import notice
from rlctl.errors import UsageError
from rlctl.recipes.search_path import MODEL, Verb, verbs
from rlctl.suggest import hydra_text, overridden_keys

if TYPE_CHECKING:
    from rlctl.recipes.layers import Recipe

app = typer.Typer()

Overrides = Annotated[
    list[str] | None,
    overrides_argument(
        "Overrides in Hydra's grammar, such as actor_rollout_ref.actor.optim.lr=1e-6."
    ),
]
RecipeOption = Annotated[
    str | None,
    recipe_option(
        "Recipe by name or file; by default the embedded quickstart, "
        "or the plain defaults if data or a model is given.",
        "NAME|PATH",
    ),
]
ConfigPath = Annotated[
    str | None,
    typer.Option(
        "--config-path",
        "-cp",
        metavar="DIR",
        help="Folder of --config-name, as verl's scripts give it.",
    ),
]
ConfigName = Annotated[
    str | None,
    typer.Option(
        "--config-name",
        "-cn",
        metavar="NAME",
        help="File in --config-path, or one of verl's configurations such as ppo_trainer.",
    ),
]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Name of the run; by default recipe, date and three letters."),
]
Logger = Annotated[
    list[str] | None,
    typer.Option(
        "--logger",
        "-l",
        help="Tracker in addition to the console; repeat for several.",
        autocompletion=complete.logger,
    ),
]
Inline = Annotated[
    bool,
    typer.Option(
        "--inline", help="Run in this process, without Ray, for breakpoints and profilers."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check everything and print the plan; start no process, write no file."
    ),
]

_EXAMPLES = """
Examples:

  rlctl train {verb}          the embedded quickstart, on a CPU

  rlctl train {verb} --recipe {recipe} trainer.total_epochs=1

  rlctl train {verb} data.train_files=train.parquet \\
    data.val_files=test.parquet {model}=DIR
"""


def _add(verb: str, facts: Verb) -> None:
    @app.command(
        verb,
        help=facts.about,
        epilog=_EXAMPLES.format(verb=verb, recipe=facts.example, model=facts.model),
    )
    def command(
        context: typer.Context,
        overrides: Overrides = None,
        recipe: RecipeOption = None,
        config_path: ConfigPath = None,
        config_name: ConfigName = None,
        name: Name = None,
        logger: Logger = None,
        inline: Inline = False,
        strict: Strict = False,
        dry_run: DryRun = False,
        as_json: DryRunJson = False,
        max_time: MaxTime = None,
        save_by: SaveBy = None,
        retries: Retries = 0,
        address: Address = None,
        detach: Detach = False,
        slurm: Slurm = None,
    ) -> None:
        if as_json and not dry_run:
            raise UsageError(
                "--json needs --dry-run",
                hint="a run writes its metrics to metrics.jsonl in its folder",
            )
        if address_option.launched(context, slurm, detach):
            return
        address_option.check_options(address, inline or dry_run or as_json)
        announce("checking the configuration")
        if config_path is not None or config_name is not None:
            from rlctl.cli.train_variants import from_name

            recipe, defaults = from_name(verb, recipe, config_path, config_name)
            overrides = [*defaults, *(overrides or [])]
        source = starting_recipe(verb, overrides or [], recipe)
        settings = [*common_settings(overrides, name), *loggers(logger)]
        with until_start(), problems_as_json(as_json):
            composed = compose_with_notices(source, settings)
            check_algorithm(verb, recipe, composed)
        words = ["train", verb, "--recipe", source, *(["--strict"] if strict else []), *settings]
        end_by = None
        if address is not None or max_time or save_by or retries:
            from rlctl.cli.time_limits import Limits
            from rlctl.cli.train_variants import train_with_retries

            limits = Limits(max_time, save_by, retries)
            if address is not None:
                from rlctl.cli.remote_jobs import submit

                submit(address, detach, [*words, *limits.words], composed)
                return
            if retries and not dry_run:
                train_with_retries(words, settings, composed, inline, limits)
            end_by = limits.end_by()
        _train(composed, inline, strict, dry_run, as_json, end_by)


for name, facts in verbs().items():
    _add(name, facts)


def common_settings(overrides: list[str] | None, name: str | None) -> list[str]:
    """Return the overrides with those of RLCTL_RUNS, unless they select a folder, and of --name."""
    settings = list(overrides or [])
    root = os.environ.get(RUNS_VARIABLE)
    if root and "trainer.run_dir" not in overridden_keys(settings):
        settings.append(hydra_text("trainer.run_dir", root))
    if name is not None:
        settings.append(hydra_text("trainer.experiment_name", name))
    return settings


def loggers(logger: list[str] | None) -> list[str]:
    """Return the override for the options --logger."""
    if not logger:
        return []
    names = dict.fromkeys(["console", *(part for names in logger for part in names.split(","))])
    return [f"trainer.logger=[{','.join(names)}]"]


def starting_recipe(verb: str, overrides: list[str], recipe: str | None) -> str:
    """Return `recipe` if given, else the plain defaults if data or a model is given, else the verb.

    The recipe named like the verb is its quickstart.
    """
    # With these overrides the plain defaults apply: the quickstart's settings suit only its model.
    replaced = {"data.train_files", MODEL, verbs()[verb].model}
    if recipe is not None or replaced.isdisjoint(overridden_keys(overrides)):
        return recipe or verb
    notice(
        f"data or model given: starting from {verb}_trainer; "
        f"`--recipe {verb}` uses the quickstart's settings"
    )
    return f"{verb}_trainer"


def check_algorithm(verb: str, given: str | None, recipe: Recipe) -> None:
    """Refuse a `given` recipe of another verb's algorithm; note another estimator than its own."""
    if given is None:
        return
    algorithm = recipe.config.algorithm.name
    if algorithm == verbs()[verb].algorithm:
        found, usual = recipe.config.algorithm.adv_estimator, verbs()[verb].estimator
        if usual not in (None, found):
            notice(f"settings decide, not `train {verb}`: algorithm.adv_estimator={found}")
        return
    other = next((name for name, facts in verbs().items() if facts.algorithm == algorithm), None)
    if other is not None:
        raise UsageError(
            f"the recipe {given} is for `{other}`, and the command says `{verb}`",
            hint=f"use `{other}` with this recipe, or the recipe {verb}",
        )


def _train(
    recipe: Recipe, inline: bool, strict: bool, dry_run: bool, as_json: bool, end_by: float | None
) -> None:
    with until_start() as on_end, problems_as_json(as_json):
        from rlctl import api

        if dry_run:
            from rlctl.cli.views import dry_run_report as report

            report.show(recipe, inline=inline, strict=strict, as_json=as_json)
        else:
            api.train(
                recipe, inline=inline, strict=strict, progress=True, end_by=end_by, on_end=on_end
            )
