"""Pools of a planned run on Ray, for the roles, rollout engines and a judge."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.cores import available_cores
from rlctl.debugging import call_limit
from rlctl.runtime.cluster.address import address_of
from rlctl.runtime.cluster.pool import PoolSpec, RayPool
from rlctl.runtime.cluster.pools import Pool, Pools
from rlctl.runtime.cluster.session import ray_session, recorded_timeline
from rlctl.runtime.planning.plan import Plan
from rlctl.tracking.tracker import Event

if TYPE_CHECKING:
    from rlctl.runtime.cluster.engine_group import EnginePool
    from rlctl.runtime.cluster.health import OnLost

JUDGE_POOL = "judge-engines"


def open_ray_pools(
    plan: Plan,
    logs: Path,
    on_phase: Callable[[str], None],
    event: Event,
    on_lost: OnLost,
    stack: ExitStack,
) -> Pools:
    """Start Ray, or connect to a cluster, and start the pools; `stack` closes them."""
    trainer = plan.config.trainer
    ray_kwargs = plan.config.ray_kwargs
    judge = plan.config.reward.judge
    num_judges = 0 if judge.model.path is None else judge.rollout.num_engines
    num_processes = sum(plan.pool_sizes.values()) + num_judges
    on_phase("starting Ray")
    session = ray_session(
        ray_kwargs.ray_init,
        ray_kwargs.ray_init.num_cpus or max(available_cores(), num_processes),
        plan.num_threads,
        trainer.timeouts.ray_start_s,
        on_lost,
    )
    stack.enter_context(session)
    stack.enter_context(recorded_timeline(ray_kwargs.timeline_json_file))
    on_phase(f"starting {num_processes} worker process{'es' if num_processes > 1 else ''}")
    workers: dict[str, Pool] = {}
    engines: EnginePool | None = None
    judges: Pool | None = None
    for name, size in (*plan.pool_sizes.items(), (JUDGE_POOL, num_judges)):
        if size == 0:
            continue
        spec = _pool_spec(plan, name, size, logs)
        if name == plan.rollout_pool:
            from rlctl.runtime.cluster.engine_group import EnginePool

            limit = trainer.timeouts.rollout_restart_s
            bundles = plan.engine_bundles
            pool = engines = EnginePool(spec, limit, event, bundles, plan.devices.kind)
            stack.callback(engines.end_changes)
        elif name == JUDGE_POOL:
            pool = judges = RayPool(spec)
        else:
            pool = workers[name] = RayPool(spec)
        if address_of(ray_kwargs.ray_init) is not None:  # else the session ends it
            stack.callback(pool.close)
    return Pools(workers, engines, judges)


def _pool_spec(plan: Plan, name: str, size: int, logs: Path) -> PoolSpec:
    trainer = plan.config.trainer
    log_path = (logs / f"{name}.log").absolute()
    device = plan.device_of(name)
    # As many processes on each node, so that no group of ranks is divided between nodes.
    per_node: tuple[int, ...] = ()
    if trainer.nnodes > 1 and name not in (plan.rollout_pool, JUDGE_POOL):
        per_node = (size // trainer.nnodes,) * trainer.nnodes
    return PoolSpec(
        name,
        size,
        replace(plan.first_rank, world_size=size, log_path=log_path, device=device),
        trainer.timeouts.worker_start(plan.devices.kind),
        call_limit(trainer.timeouts.call_s),
        trainer.balance_batch,
        trainer.placement.device_fraction,
        per_node,
    )
