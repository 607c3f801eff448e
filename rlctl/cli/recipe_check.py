"""What `rlctl recipes check` finds out about one recipe, data and models aside."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rlctl.errors import Problem, RlctlError


@dataclass(frozen=True)
class Verdict:
    """`problems` make it unusable; `idle` are keys that are set and have no effect."""

    name: str
    problems: list[Problem] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    exit_code: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.name,
            "ok": not self.problems,
            "problems": [asdict(each) for each in self.problems],
            "no_effect": self.idle,
        }


def examine(name: str, strict: bool) -> Verdict:
    """Compose a recipe, find its plug-ins and let its algorithm judge it."""
    from rlctl.recipes.compose import compose
    from rlctl.recipes.roles import needed_roles
    from rlctl.recipes.unused_keys import report_unused_keys
    from rlctl.runtime.build import load_algorithm

    try:
        recipe = compose(name)
        needs = load_algorithm(recipe.config, num_steps=1).needs
        roles = [role.name for role in needed_roles(recipe.config.trainer.placement, needs)]
        return Verdict(name, idle=report_unused_keys(recipe, roles, strict=strict))
    except RlctlError as error:
        return Verdict(name, problems=error.problems, exit_code=error.exit_code)
