"""Plan of a run, and the point that it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.recipes.compose import Recipe
from rlctl.runtime.planning.plan import Plan, make_plan

if TYPE_CHECKING:
    from rlctl.recipes.recorded_config import Change
    from rlctl.runtime.training.restore import ResumePoint


@dataclass(frozen=True)
class StartPlan:
    """A plan and the point that it starts from.

    `notes` and `warnings` are for the user. `finished` means that no step is left.
    """

    plan: Plan
    start: ResumePoint | None
    changes: Sequence[Change] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    finished: bool = False


def prepare_start(recipe: Recipe, inline: bool) -> None:
    """Fork the server of Ray's workers, because the checks of a plan start threads."""
    if not inline:
        from rlctl.runtime.cluster import fork_server

        fork_server.start(recipe.config.ray_kwargs.ray_init.address)


def plan_new(recipe: Recipe, inline: bool) -> StartPlan:
    """Plan a new run; start and write nothing."""
    return StartPlan(make_plan(recipe, inline), None)
