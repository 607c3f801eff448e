"""Worker groups as Python: programs of one process that computes on many.

    from rlctl.workers import Dispatch, ResourcePool, Worker, dispatch, session, spawn

    class Model(Worker):
        @dispatch(dispatch_fn=lambda group, rows: chunks(rows, group.world_size), collect_fn=...)
        def infer(self, rows): ...

    with session(), ResourcePool(2) as pool:
        model = spawn(Model, pool)
        model.infer(rows)

docs/workers.md describes the parts. Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlctl.recipes.layers import Recipe
    from rlctl.runtime.base.batch import Batch, LogProbs, Prompts, Ragged, Rollouts, Scored, Scores
    from rlctl.runtime.base.rank_info import RankInfo
    from rlctl.runtime.base.roles import Reward, Roles
    from rlctl.runtime.cluster.programs import ResourcePool, session, spawn
    from rlctl.runtime.planning.plan import Plan
    from rlctl.runtime.workers.dispatch import Dispatch, Worker, dispatch

_MODULES = {
    "rlctl.runtime.base.batch": (
        *("Batch", "LogProbs", "Prompts", "Ragged", "Rollouts", "Scored", "Scores"),
    ),
    "rlctl.runtime.cluster.programs": ("ResourcePool", "session", "spawn"),
    "rlctl.runtime.base.rank_info": ("RankInfo",),
    "rlctl.runtime.workers.dispatch": ("Dispatch", "Worker", "dispatch"),
}

__all__ = [
    "Batch",
    "Dispatch",
    "LogProbs",
    "Prompts",
    "Ragged",
    "RankInfo",
    "ResourcePool",
    "Rollouts",
    "Scored",
    "Scores",
    "Worker",
    "dispatch",
    "make_plan",
    "session",
    "spawn",
    "spawn_roles",
]


def make_plan(recipe: Recipe) -> Plan:
    """Check a recipe and read its data: `loader`, `tokenizer`, `algorithm`, `num_steps`.

    Raises all problems at once; starts nothing.

        plan = make_plan(rlctl.compose("ppo", ["data.train_batch_size=8"]))
        plan.loader.batch_at(1)  # the prompts of step 1
    """
    from rlctl.runtime.planning.plan import make_plan

    return make_plan(recipe, inline=False)


def spawn_roles(plan: Plan, pools: Mapping[str, ResourcePool], reward: Reward) -> Roles:
    """Build the models that the plan's algorithm needs, and the actor's rollout engine.

    `pools` has the pools of `trainer.placement` by name. `reward` is any object with
    `compute_scores(rollouts) -> Scores`. Raises UsageError for a missing pool.

        roles = spawn_roles(plan, {"main": pool}, reward)
        roles.generator.update_weights()
    """
    from rlctl.errors import UsageError
    from rlctl.runtime.build import build_roles
    from rlctl.runtime.cluster.pools import Pools

    missing = [name for name in plan.pool_sizes if name not in pools]
    if missing:
        raise UsageError(
            f"there is no pool for {', '.join(missing)}",
            where="trainer.placement",
            hint=f"give the pools {', '.join(plan.pool_sizes)}",
        )
    if plan.rollout_pool is not None:
        raise UsageError(
            "a program has no pools of rollout engines",
            where="trainer.placement",
            hint="trainer.placement.rollout=null",
        )
    given = Pools(dict(pools))
    roles, _ = build_roles(
        plan.config, plan.algorithm, plan.tokenizer, given, reward, lambda _phase: None
    )
    return roles


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'rlctl.workers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
