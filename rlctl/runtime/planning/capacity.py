"""Whether what a run holds throughout fits its devices at all."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rlctl.errors import Problem
from rlctl.recipes import schema
from rlctl.recipes.roles import REFERENCE, is_adapter_base, rollout_pool
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.model.load import Kind, compute_dtype, master_dtype
from rlctl.runtime.planning.memory import (
    ModelSize,
    RoleMemory,
    Storage,
    UnknownSizeError,
    Work,
    device_memory,
    role_memory,
)
from rlctl.runtime.planning.preflight import Devices, read_model_config

GIB = 2**30


def check_capacity(
    config: schema.Config, devices: Devices, ranks: Mapping[str, int], needs: Needs
) -> list[Problem]:
    """Weights and moments of every role of a pool, and the gradients of one, against the memory of a device. `ranks` are pool -> processes.

    These are exact, so what does not fit is a problem; activations and caches are estimates, of which a dry run warns. A role whose size
    cannot be told beforehand is left out with a warning.
    """
    actor_rollout, critic, placement = (
        config.actor_rollout_ref,
        config.critic,
        config.trainer.placement,
    )
    pools: dict[str, list[RoleMemory]] = {}
    unknown: list[str] = []

    def add(
        role: str, pool: str, model: schema.Model, fsdp: schema.FSDP | schema.FrozenFSDP, kind: Kind
    ) -> None:
        read_model_config(
            model, f"{'critic' if role == 'critic' else 'actor_rollout_ref'}.model.path"
        )
        storage = Storage.of(
            master_dtype(fsdp), compute_dtype(model, devices.kind), ranks[pool], fsdp
        )
        if role == "rollout":  # engines compute with a copy of their own, whole on every device
            storage = Storage.of(
                compute_dtype(model, devices.kind), compute_dtype(model, devices.kind), 1, fsdp
            )
        work = Work(
            tokens=0,
            learns=role in ("actor", "critic"),
            checkpointing=True,
            has_logits=False,
            kv_tokens=0,
        )
        try:
            pools.setdefault(pool, []).append(
                role_memory(role, ModelSize.of(model, kind), storage, work)
            )
        except UnknownSizeError as error:
            unknown.append(error.problems[0].message)

    add("actor", placement.actor, actor_rollout.model, actor_rollout.actor.fsdp_config, "policy")
    if (pool := rollout_pool(placement, needs)) is not None:
        add("rollout", pool, actor_rollout.model, actor_rollout.actor.fsdp_config, "policy")
    if Needs.REFERENCE in needs and not is_adapter_base(REFERENCE, config):
        add(
            "reference",
            placement.reference,
            actor_rollout.model,
            actor_rollout.ref.fsdp_config,
            "policy",
        )
    if Needs.CRITIC in needs:
        add("critic", placement.critic, critic.model, critic.fsdp_config, "backbone")
    for message in dict.fromkeys(unknown):
        print(f"warning: {message}", file=sys.stderr)
    there = device_memory(devices.kind, max(1, sum(ranks.values()) // devices.num_nodes))
    problems: list[Problem] = []
    for pool, roles in pools.items():
        need = sum(each.parameters + each.moments for each in roles) + max(
            each.gradients for each in roles
        )
        if need > there:
            names = ", ".join(each.role for each in roles)
            problems.append(
                Problem(
                    f"the pool {pool} ({names}) needs {need / GIB:.1f} GiB on each device for weights, moments and gradients alone, "
                    f"and there are {there / GIB:.1f} GiB",
                    "trainer.placement",
                    "more devices, a smaller model, or actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
                )
            )
    return problems
