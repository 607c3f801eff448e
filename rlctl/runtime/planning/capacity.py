"""Checks of a memory plan against the devices and the memory of the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlctl.errors import Problem
from rlctl.runtime.base.ops import ceil_div
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.memory import GIB
from rlctl.runtime.planning.role_memory import MemoryPlan
from rlctl.runtime.sandbox.worker_settings import usable_memory


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
            if any(role.engine.share is not None for role in roles):
                from rlctl.runtime.planning.engine_memory import engine_problems

                yield from engine_problems(plan, pool, roles, available)
            continue
        names = ", ".join(role.role for role in roles)
        yield Problem(
            f"the pool {pool} ({names}) needs {needed / GIB:.1f} GiB on each device for "
            f"weights, moments and gradients, and {available / GIB:.1f} GiB are available",
            "trainer.placement",
            "more devices, a smaller model, or "
            "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
        )


def describe(plan: MemoryPlan, devices: Devices, ranks: Mapping[str, int]) -> str:
    """Return the planned memory of each pool and its roles."""
    available = memory_of(devices, sum(ranks.values()))
    of = ""
    if available is not None:
        of = f" of {available / GIB:.1f}"
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
