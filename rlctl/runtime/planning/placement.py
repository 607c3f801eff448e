"""Checks of pools: their roles, their GPUs, and generation during training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from rlctl.errors import Problem
from rlctl.recipes import schema
from rlctl.recipes.role_table import ACTOR, ROLES, ROLLOUT, built_roles
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.ops import divisors
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.preflight import check_batches
from rlctl.runtime.rollout.auto import load_engine

_SECTION = "async_training"
_TENSOR = "tensor_model_parallel_size"


def check_placement(
    config: schema.Config, devices: Devices, pools: Sequence[str], rollout_pool: str | None
) -> Iterator[Problem]:
    """Yield the problems of pools and schedule, such as more GPUs than a node has.

    A pool of rollout engines may hold no other role, because a failed engine is restarted.
    """
    sizes = {name: config.trainer.placement.pools.get(name, devices.per_node) for name in pools}
    if rollout_pool is not None and config.actor_rollout_ref.rollout.is_client:
        del sizes[rollout_pool]  # its processes have no device
    if rollout_pool is not None:
        yield from _check_rollout_pool(config, rollout_pool)
    yield from _check_async(config, devices.kind, rollout_pool)
    unknown = [name for name in config.trainer.placement.pools if name not in pools]
    if unknown:
        yield Problem(
            f"trainer.placement.pools names {', '.join(map(repr, unknown))}, where no role is "
            "placed",
            "trainer.placement.pools",
            f"pools with roles: {', '.join(pools)}",
        )
    total = sum(sizes.values())
    yield from _check_judge(config, devices, total)
    yield from _check_fraction(config.trainer.placement, devices, sizes)
    yield from _check_nodes(config, devices, sizes, rollout_pool)
    if devices.kind == "cuda" and total > devices.per_node:
        listing = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        yield Problem(
            f"the pools need {total} GPUs per node ({listing}), but each node has "
            f"{devices.per_node}",
            "trainer.placement",
            "set the size of each pool in trainer.placement.pools, or put the roles into one pool",
        )


def check_sizes(config: schema.Config, ranks: Mapping[str, int], needs: Needs) -> Iterator[Problem]:
    """Yield the problems of batches and meshes with the processes of each pool, `ranks`."""
    parts = [role.fsdp(config) for role in built_roles(config, needs)]
    if any(fsdp is not None and fsdp.has_mesh for fsdp in parts):
        from rlctl.runtime.planning.mesh import check_meshes

        yield from check_meshes(config, ranks, needs)
    yield from check_batches(config, ranks, needs)


def _check_fraction(
    placement: schema.Placement, devices: Devices, sizes: Mapping[str, int]
) -> Iterator[Problem]:
    """Yield a problem if two ranks of a pool would be on one GPU, which NCCL refuses."""
    several = [name for name, size in sizes.items() if size > 1]
    if devices.kind == "cuda" and placement.device_fraction <= 0.5 and several:
        yield Problem(
            f"with trainer.placement.device_fraction={placement.device_fraction:g} ranks of the "
            f"pool {several[0]} would share a GPU",
            "trainer.placement.device_fraction",
            "1; or one rank in each pool: trainer.n_gpus_per_node=1",
        )


def _check_nodes(
    config: schema.Config, devices: Devices, sizes: Mapping[str, int], rollout_pool: str | None
) -> Iterator[Problem]:
    """Yield a problem for each size with which groups of adjacent ranks straddle a node.

    A copy of the parameters, and an engine, may take several whole nodes.
    """
    if devices.num_nodes == 1:
        return
    keys: dict[tuple[str, int, int, int], str] = {}  # of the first role with such groups
    for role in ROLES:
        fsdp = role.fsdp(config)
        pool = role.pool(config.trainer.placement)
        if fsdp is None or pool is None or pool not in sizes:
            continue
        number = sizes[pool]
        tensor = fsdp.tensor_model_parallel_size
        keys.setdefault((_TENSOR, tensor, tensor, number), f"{role.fsdp_key}.{_TENSOR}")
        width = fsdp.fsdp_size * tensor * fsdp.pipeline_model_parallel_size
        if fsdp.fsdp_size > 0 and width % number:
            group = "fsdp_size", fsdp.fsdp_size, width, number
            keys.setdefault(group, f"{role.fsdp_key}.fsdp_size")
    pool = rollout_pool or ACTOR.pool(config.trainer.placement)
    if pool is not None and pool in sizes:
        tensor = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        group = "engine", tensor, tensor, sizes[pool]
        if tensor % sizes[pool]:
            keys.setdefault(group, f"{ROLLOUT.section}.{_TENSOR}")
    for (kind, size, width, number), key in keys.items():
        if number % width:
            hint = f"groups of {', '.join(map(str, divisors(number)))} ranks stay on their node"
            if kind == "engine":
                hint += f", and {2 * number} are those of two nodes"
            yield Problem(
                f"{key}={size} gives groups of {width} ranks, which nodes with {number} processes "
                "of the pool would divide",
                key,
                hint,
            )


def _check_judge(config: schema.Config, devices: Devices, num_used: int) -> Iterator[Problem]:
    """Yield a problem if this machine has too few GPUs for the engines of the run's judge."""
    judge = config.reward.judge
    if judge.model.path is None or devices.kind != "cuda" or devices.num_nodes > 1:
        return
    if not torch.cuda.is_available():  # they are on another machine
        return
    wanted = judge.rollout.num_engines
    found = torch.cuda.device_count()
    if num_used + wanted > found:
        yield Problem(
            f"{wanted} engines of the judge need GPUs of their own beside {num_used} of the "
            f"trainer, but this machine has {found}",
            "reward.judge.rollout.num_engines",
            f"trainer.n_gpus_per_node={max(1, found - wanted)}",
        )


def _check_rollout_pool(config: schema.Config, pool: str) -> Iterator[Problem]:
    placement = config.trainer.placement
    others = [role.name for role in ROLES if role is not ROLLOUT and role.pool(placement) == pool]
    if others:
        yield Problem(
            f"pool {pool!r} holds the rollout engines and {' and '.join(others)}",
            "trainer.placement",
            "a separate pool: the restart of a failed engine would end the other roles",
        )


def _check_async(config: schema.Config, device: str, rollout_pool: str | None) -> Iterator[Problem]:
    """Yield the problems of an asynchronous schedule that the settings do not support.

    `device` is "cpu" or "cuda"; `rollout_pool` is the pool of the rollout engines, None if the
    actor's processes hold them.
    """
    asynchronous = config.async_training
    if not asynchronous.eager:
        if asynchronous.max_staleness > 1:
            yield Problem(
                "the schedule fixed generates exactly one step ahead",
                f"{_SECTION}.max_staleness={asynchronous.max_staleness}",
                f"{_SECTION}.max_staleness=1, or {_SECTION}.schedule=eager",
            )
        return
    where = f"{_SECTION}.schedule=eager"
    if rollout_pool is None:
        yield Problem(
            "engines generate without a pause, but they share the processes of the actor",
            where,
            "trainer.placement.rollout=engines and "
            "trainer.placement.pools={main: 1, engines: 1} give them a pool of their own; "
            f"{_SECTION}.schedule=fixed works without",
        )
    from rlctl.runtime.rollout.exchange import InFlightEngine

    name = config.actor_rollout_ref.rollout.name
    if not issubclass(load_engine(name, device), InFlightEngine):
        yield Problem(
            f"the engine {name} cannot load weights in mid-response",
            where,
            f"actor_rollout_ref.rollout.name=hf|vllm, or {_SECTION}.schedule=fixed",
        )
    if config.algorithm.filter_groups.enable:
        yield Problem(
            "a step learns from the oldest groups that are finished, and none is dropped, but "
            "algorithm.filter_groups.enable=true drops groups",
            where,
            f"algorithm.filter_groups.enable=false, or {_SECTION}.schedule=fixed",
        )
