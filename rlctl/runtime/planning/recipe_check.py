"""Check of a recipe without its data and models, for `rlctl recipes check`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rlctl.errors import Problem, RlctlError
from rlctl.recipes.compose import compose
from rlctl.recipes.roles import needed_roles
from rlctl.recipes.unused_keys import report_unused_keys
from rlctl.runtime.build import load_algorithm


@dataclass(frozen=True)
class RecipeCheck:
    """Problems of a recipe, which make it unusable, and its keys without effect."""

    name: str
    problems: list[Problem] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    exit_code: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return what `rlctl recipes check --json` prints."""
        return {
            "recipe": self.name,
            "ok": not self.problems,
            "problems": [asdict(each) for each in self.problems],
            "no_effect": self.unused,
        }


def check_recipe(name: str, *, strict: bool = False) -> RecipeCheck:
    """Compose a recipe and load its plug-ins; data and models are not read."""
    try:
        recipe = compose(name)
        needs = load_algorithm(recipe.config, num_steps=1).needs
        roles = {role.name for role in needed_roles(recipe.config, needs)}
        return RecipeCheck(name, unused=report_unused_keys(recipe, roles, strict=strict))
    except RlctlError as error:
        return RecipeCheck(name, problems=error.problems, exit_code=error.exit_code)
