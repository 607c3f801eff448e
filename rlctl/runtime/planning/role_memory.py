"""Memory plan of a run: what its roles and pools take on one device, from config alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from rlctl.errors import Problem
from rlctl.recipes import schema
from rlctl.recipes.roles import ACTOR, REFERENCE, Role, built_roles, engine_role, rollout_pool
from rlctl.runtime.algorithms.base import Needs, rows_per_prompt
from rlctl.runtime.model.load import compute_dtype, master_dtype
from rlctl.runtime.ops import ceil_div
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.gpus import GPUS, MIB
from rlctl.runtime.planning.memory import (
    RoleMemory,
    Storage,
    Work,
    device_memory,
    role_memory,
)
from rlctl.runtime.planning.model_size import ModelSize, UnknownSizeError
from rlctl.runtime.planning.preflight import read_model_config
from rlctl.runtime.rollout.sampling_params import num_requests
from rlctl.runtime.workers.optimizers import bytes_per_parameter
from rlctl.runtime.workers.passes import most_in_run

GIB = 2**30


@dataclass(frozen=True)
class PlannedRole:
    """A role with a model of its own, and its storage and memory on one device."""

    role: Role
    pool: str
    storage: Storage
    memory: RoleMemory | None  # None: the size of the model is unknown


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of every role on one device."""

    roles: list[PlannedRole]
    warnings: list[str]  # why the size of a model is unknown

    def known(self) -> list[RoleMemory]:
        """Return the memory of the roles whose size is known."""
        return [each.memory for each in self.roles if each.memory is not None]

    def pools(self) -> dict[str, list[RoleMemory]]:
        """Return the memory of the roles of each pool, as far as it is known."""
        pools: dict[str, list[RoleMemory]] = {}
        for each in self.roles:
            if each.memory is not None:
                pools.setdefault(each.pool, []).append(each.memory)
        return pools


def plan_memory(
    config: schema.Config,
    devices: Devices,
    ranks: Mapping[str, int],
    needs: Needs,
    references: Mapping[str, schema.Model] | None = None,
    size_of: Callable[[schema.Model, Role], ModelSize] | None = None,
) -> MemoryPlan:
    """Estimate the memory of every role on one device.

    `ranks` maps pools to processes. `references` are the models, by name, between which the
    algorithm chooses; `size_of` replaces `read_size`, for which see the errors.
    """
    roles: list[PlannedRole] = []
    warnings: list[str] = []
    for role, name, model in _models(config, needs, references or {}):
        pool = role.pool(config.trainer.placement)
        assert pool is not None, f"the role {role.name} is built, so it has a pool"
        storage = _storage(role, config, devices.kind, ranks[pool])
        memory: RoleMemory | None = None
        try:
            size = (size_of or read_size)(model, role)
            work = _work(role, config, devices.kind, ranks[pool], needs)
            memory = role_memory(name, size, storage, work)
        except UnknownSizeError as error:
            warnings.append(error.problems[0].message)
        roles.append(PlannedRole(role, pool, storage, memory))
    return MemoryPlan(roles, list(dict.fromkeys(warnings)))


def read_size(model: schema.Model, role: Role) -> ModelSize:
    """Return the size of the model of `role`. Raises `ConfigError` without a usable config.json."""
    read_model_config(model, f"{role.model_key}.path")
    return ModelSize.from_config(model, role.kind)


def _models(
    config: schema.Config, needs: Needs, references: Mapping[str, schema.Model]
) -> Iterator[tuple[Role, str, schema.Model]]:
    """Yield each model that is loaded, with its role and a name for both."""
    for role in built_roles(config, needs):
        if role is not REFERENCE or not references:
            yield role, role.name, role.model(config)
    for name, model in references.items():
        yield REFERENCE, f"{REFERENCE.name} {name}", model


def memory_of(devices: Devices, num_processes: int) -> int | None:
    """Return the bytes available to each process; None for GPUs that only the cluster knows."""
    if devices.kind == "cuda" and not torch.cuda.is_available():
        return GPUS[devices.gpu] * MIB if devices.gpu in GPUS else None
    return device_memory(devices.kind, max(1, num_processes // devices.num_nodes))


def check_capacity(plan: MemoryPlan, devices: Devices, ranks: Mapping[str, int]) -> list[Problem]:
    """Return a problem for each pool whose exact part of the memory exceeds a device.

    Exact are the weights and moments of all roles of a pool, and the gradients of one of them.
    Activations and caches are estimates, so only a dry run warns of them.
    """
    available = memory_of(devices, sum(ranks.values()))
    problems: list[Problem] = []
    if available is None:
        return problems
    for pool, roles in plan.pools().items():
        needed = sum(each.parameters + each.moments for each in roles)
        needed += max(each.gradients for each in roles)
        if needed > available:
            names = ", ".join(each.role for each in roles)
            problems.append(
                Problem(
                    f"the pool {pool} ({names}) needs {needed / GIB:.1f} GiB on each device for "
                    f"weights, moments and gradients, and {available / GIB:.1f} GiB are available",
                    "trainer.placement",
                    "more devices, a smaller model, or "
                    "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
                )
            )
    return problems


def _storage(role: Role, config: schema.Config, device: str, num_ranks: int) -> Storage:
    """Return how the model of `role` is stored on each of `num_ranks` devices."""
    compute, fsdp = compute_dtype(role.model(config), device), role.fsdp(config)
    if fsdp is None:
        return Storage.unsharded(compute)
    master = master_dtype(fsdp) if role.learns else compute
    return Storage.from_config(master, compute, num_ranks, fsdp, device)


def _work(role: Role, config: schema.Config, device: str, num_ranks: int, needs: Needs) -> Work:
    """Return the largest micro-batch of `role` on one rank.

    That is the token budget, or fewer tokens where a rank does not have as many, but at least one
    row of the longest length, or the rank's slice of it.
    """
    data, n = config.data, rows_per_prompt(config, needs)
    kv_tokens = 0
    if role is engine_role(config, needs):
        kv_tokens = _kv_tokens(config, num_ranks, needs)
    engine_ranks = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    # On a CPU engines keep no cache, with or without the setting.
    keeps_cache = not config.actor_rollout_ref.rollout.free_cache_engine and device != "cpu"
    if role.passes is None:
        return Work(0, False, False, kv_tokens, engine_ranks)
    model = role.model(config)
    longest = data.max_prompt_length + data.max_response_length
    prompts = role.learner(config).ppo_mini_batch_size if role.learns else data.train_batch_size
    max_rows = role.max_rows(config)
    fsdp = role.fsdp(config)
    slices = fsdp.ulysses_sequence_parallel_size if fsdp else 1
    budget = role.max_tokens(config) * slices if max_rows is None else max_rows * longest
    rows = ceil_div(prompts * n * role.ranks_per_row(config), num_ranks)
    stages = fsdp.pipeline_model_parallel_size if fsdp else 1
    tokens = max(longest, min(budget, ceil_div(rows, stages) * longest))
    num_parts = min(ceil_div(rows * longest, tokens), most_in_run(stages))
    # Hidden states come in and go out, or have a gradient; between two stages that comes in, too.
    copies = 0 if stages == 1 else 3 if role.learns and stages > 2 else 2
    return Work(
        tokens=ceil_div(tokens, slices),
        learns=role.learns,
        in_flight=num_parts
        if fsdp and stages > 1 and fsdp.pipeline_schedule == "gpipe"
        else stages,
        passed_on=copies * num_parts,
        recomputed=model.enable_gradient_checkpointing
        and model.gradient_checkpointing_every_n_layers,
        offloads=model.enable_activation_offload and device != "cpu",
        state_bytes=bytes_per_parameter(role.learner(config).optim) if role.learns else None,
        has_logits=role.kind == "policy",
        kv_tokens=kv_tokens,
        engine_ranks=engine_ranks,
        keeps_cache=keeps_cache,
        averages=role is ACTOR and Needs.AVERAGE in needs,
    )


def _kv_tokens(config: schema.Config, num_ranks: int, needs: Needs) -> int:
    """Return the tokens that an engine caches at a time, for responses of the longest length."""
    data, rollout, n = (
        config.data,
        config.actor_rollout_ref.rollout,
        rows_per_prompt(config, needs),
    )
    parts = ceil_div(num_ranks, rollout.tensor_model_parallel_size)
    if rollout_pool(config, needs) is not None and rollout.mode == "sync":
        parts = num_requests(rollout, data.train_batch_size, num_ranks)  # one request at a time
    prompts = min(ceil_div(data.train_batch_size, parts), max(1, rollout.max_num_seqs // n))
    return prompts * (data.max_prompt_length + n * data.max_response_length)
