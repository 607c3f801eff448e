"""Checks of a memory plan against the devices and the memory of the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from rlctl.errors import Problem
from rlctl.recipes.schema.policy import MOST_OF_A_GPU
from rlctl.runtime.ops import ceil_div
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.memory import GIB, RoleMemory, generating
from rlctl.runtime.planning.role_memory import MemoryPlan
from rlctl.runtime.sandbox.worker_settings import usable_memory

LOG = logging.getLogger(__name__)

_UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"
_TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_STEPS = 20  # of the utilization: 0.05 each


def memory_of(devices: Devices, num_processes: int) -> int | None:
    """Return the bytes available to each process; None for GPUs of unknown memory.

    On a CPU that is an equal share of the host's memory or of the container's limit.
    """
    if devices.kind == "cuda":
        return devices.memory
    return usable_memory() // max(1, num_processes // devices.num_nodes)


def check_capacity(
    plan: MemoryPlan, devices: Devices, ranks: Mapping[str, int]
) -> Iterator[Problem]:
    """Yield a problem for each pool that cannot fit on its devices.

    Exact are the weights and moments of all roles of a pool, the gradients of one of them, and the
    share of vLLM. Activations and other caches are estimates, so only a dry run warns of them.
    """
    available = memory_of(devices, sum(ranks.values()))
    if available is None:
        return
    for pool, roles in plan.pools().items():
        needed = sum(role.parameters + role.moments for role in roles)
        needed += max(role.gradients + role.visiting for role in roles)
        if needed <= available:
            yield from _check_engine(plan, pool, roles, available)
            continue
        names = ", ".join(role.role for role in roles)
        yield Problem(
            f"the pool {pool} ({names}) needs {needed / GIB:.1f} GiB on each device for "
            f"weights, moments and gradients, and {available / GIB:.1f} GiB are available",
            "trainer.placement",
            "more devices, a smaller model, or "
            "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
        )


def largest_utilization(plan: MemoryPlan, pool: str, available: int, device: int) -> float:
    """Return the share of a `device` that `available` bytes leave to the engine of a pool."""
    roles = plan.pools()[pool]
    # The share of a role of engines includes its weights.
    others = (role for role in roles if role.engine.share is None or role.engine.weights)
    left = available - plan.overhead(pool) - sum(role.resident for role in others)
    return min(MOST_OF_A_GPU, max(0, left * _STEPS // device) / _STEPS)


def describe(plan: MemoryPlan, devices: Devices, ranks: Mapping[str, int]) -> str:
    """Return the planned memory of each pool and its roles."""
    available = memory_of(devices, sum(ranks.values()))
    of = f" of {available / GIB:.1f}" if available is not None else ""
    pools = plan.pools()
    return "; ".join(
        f"planned for the pool {pool}: {peak / GIB:.1f}{of} GiB, "
        + ", ".join(
            f"{role.role} {role.resident / GIB:.1f} + passes {role.passing / GIB:.1f} "
            f"or engine {role.engine.awake / GIB:.1f}"
            for role in pools[pool]
        )
        for pool, peak in plan.peaks().items()
    )


def _check_engine(
    plan: MemoryPlan, pool: str, roles: Sequence[RoleMemory], available: int
) -> Iterator[Problem]:
    """Yield a problem if vLLM's share does not fit beside the trainer's state, or holds no row.

    If it holds one but for the estimates, this is a warning.
    """
    role = next((role for role in roles if role.engine.share is not None), None)
    if role is None:
        return
    engine, share = role.engine, role.engine.share or 0
    possible = largest_utilization(plan, pool, available, available)
    proposal = f"{_UTILIZATION}={possible:g}"
    needed = generating(roles) + plan.overhead(pool)
    if engine.num_rows == 0:
        weights = engine.weights or role.parameters  # of a role of engines
        other = engine.graphs + engine.scratch
        problem = Problem(
            f"vLLM gets {share / GIB:.1f} GiB of each GPU of the pool {pool}, and needs "
            f"{weights / GIB:.1f} for weights, about {other / GIB:.1f} for CUDA graphs and a pass, "
            f"and {engine.row_cache / GIB:.1f} for the cache of one row of the longest length",
            _UTILIZATION,
            f"a larger {_TENSOR}"
            + (f", {proposal}" if possible * available > share else "")
            + ", or shorter rows; `rlctl fit` searches for values",
        )
        if weights + engine.row_cache > share:
            yield problem
        else:
            LOG.warning(str(problem))
    elif needed > available and any(role.learns for role in roles):
        fits = possible * available >= engine.awake - engine.cache + engine.row_cache
        yield Problem(
            f"the pool {pool} needs {needed / GIB:.1f} GiB on each GPU when vLLM wakes up, and "
            f"{available / GIB:.1f} GiB are available: "
            f"{sum(role.resident for role in roles) / GIB:.1f} for weights and moments of "
            f"{', '.join(role.role for role in roles)}, {engine.awake / GIB:.1f} for vLLM, and "
            f"about {plan.overhead(pool) / GIB:.1f} for CUDA and NCCL",
            _UTILIZATION,
            (f"{proposal}, " if fits else "")
            + "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true, or more ranks",
            (_UTILIZATION, proposal) if fits else None,
        )


def host_bytes(plan: MemoryPlan, devices: Devices, ranks: Mapping[str, int]) -> int:
    """Return the bytes of host memory that a node needs for state of its GPUs and checkpoints.

    That is offloaded state, the copy of a checkpoint while it is written, and the exported model
    of the first rank. Files that are mapped are not counted: the kernel drops their pages.
    """
    total = 0
    for planned in plan.roles:
        if (memory := planned.memory) is not None and memory.host:
            total += memory.host * ceil_div(ranks[planned.pool], devices.num_nodes)
            total += memory.num_parameters * planned.storage.master * memory.learns
    return total
