"""Command line that starts the same run as a call of the Python API.

The command line of the process is that of another program, such as a notebook's kernel.
"""

from __future__ import annotations

from rlctl.recipes.compose import Recipe
from rlctl.recipes.recorded_config import changes
from rlctl.recipes.search_path import library_recipes, verbs
from rlctl.runtime.planning.plan import Plan
from rlctl.runtime.training.restore import ResumePoint
from rlctl.suggest import written

_OVERRIDE = "override "
_OF_A_FORK = ("trainer.experiment_name", "trainer.resume_mode")


def equivalent_command(plan: Plan, start: ResumePoint | None) -> list[str]:
    """Return the words of the command for a new run."""
    recipe = plan.recipe
    trainer = plan.config.trainer
    if start is not None and start.parent is not None and trainer.resume_mode == "disable":
        changed = changes(recipe.path.parent, recipe.recorded)
        settings = [f"{key.key}={written(key.new)}" for key in changed if key.key not in _OF_A_FORK]
        fork = ["--from-step", str(start.step), "--fork", str(trainer.experiment_name)]
        words = ["resume", recipe.name, *settings, *fork]
    else:
        shipped = library_recipes().get(recipe.name) == recipe.path
        source = recipe.name if shipped else str(recipe.path)
        words = ["train", _verb(recipe), "--recipe", source, *_overrides(recipe)]
    if plan.inline:
        words.append("--inline")
    return ["rlctl", *words]


def _verb(recipe: Recipe) -> str:
    """Return the verb of the recipe's name, or the first one of its algorithm."""
    name = recipe.name.removesuffix("_trainer")
    if name in verbs():
        return name
    algorithm = recipe.config.algorithm.name
    fitting = (verb for verb, facts in verbs().items() if facts.algorithm == algorithm)
    return next(fitting, "ppo")


def _overrides(recipe: Recipe) -> list[str]:
    """Return the overrides of the recipe as they were given."""
    settings = (setting for chain in recipe.origins.values() for setting in chain)
    given = (setting.where for setting in settings if setting.level == 3)
    return list(dict.fromkeys(where.removeprefix(_OVERRIDE) for where in given))
