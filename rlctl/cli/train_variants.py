"""Starts of `rlctl train` with a recipe named as verl's scripts do, and with `--retries`."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from rlctl.cli.stderr import notice
from rlctl.cli.time_limits import Limits
from rlctl.errors import UsageError
from rlctl.recipes.layers import Recipe
from rlctl.suggest import hydra_text


def from_name(
    verb: str, recipe: str | None, path: str | None, name: str | None
) -> tuple[str, list[str]]:
    """Return recipe and overrides that `--config-path` and `--config-name` select."""
    from rlctl.recipes.dialects import named_recipe

    if recipe is not None:
        raise UsageError(
            "--recipe cannot be combined with --config-path or --config-name",
            hint="leave out --recipe, or give the file to it: --recipe DIR/NAME.yaml",
        )
    found, defaults = named_recipe(verb, path, name)
    start = " ".join([found, *defaults])
    notice(f"--config-name={name or 'ppo_trainer'}: starting from {start}")
    return found, defaults


def train_with_retries(
    words: list[str], settings: list[str], recipe: Recipe, inline: bool, limits: Limits
) -> NoReturn:
    """Train in a child process, and resume the run after crashes; exit with the last code."""
    from rlctl.runs.naming import fresh_name

    trainer = recipe.config.trainer
    name = trainer.experiment_name or fresh_name(recipe.name.removesuffix("_trainer"))
    folder = Path(trainer.run_dir) / trainer.project_name / name
    if not trainer.experiment_name:
        words = [*words, hydra_text("trainer.experiment_name", name)]
    limits.supervise(words, folder, inline, settings)
