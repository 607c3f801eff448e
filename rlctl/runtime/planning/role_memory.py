"""Memory plan of a run: what its roles and pools take on one device, from config alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rlctl.recipes import schema
from rlctl.recipes.role_table import (
    ACTOR,
    REFERENCE,
    ROLLOUT,
    Role,
    built_roles,
    engine_role,
    rollout_pool,
)
from rlctl.runtime.algorithms.base import Needs, rows_per_prompt
from rlctl.runtime.base.ops import ceil_div
from rlctl.runtime.model.load import compute_dtype, master_dtype
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.memory import (
    GIB,
    EngineMemory,
    RoleMemory,
    Storage,
    Work,
    peak_of,
    role_memory,
)
from rlctl.runtime.planning.model_size import ModelSize, UnknownSizeError
from rlctl.runtime.planning.preflight import read_model_config
from rlctl.runtime.rollout.auto import plans_vllm
from rlctl.runtime.rollout.sampling_params import rows_at_a_time
from rlctl.runtime.workers.optimizers import bytes_per_parameter
from rlctl.runtime.workers.passes import PARTS_PER_STAGE

_CONTEXT = GIB // 2  # of CUDA and the kernels that a process loads
_STATE = 4  # bytes of a number of a state: float32
_COMMUNICATOR = GIB // 4  # buffers of NCCL in a group


@dataclass(frozen=True)
class PlannedRole:
    """A role with a separate model, and its storage and memory on one device."""

    role: Role
    pool: str
    storage: Storage
    memory: RoleMemory | None  # None: the size of the model is unknown


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of every role on one device."""

    roles: list[PlannedRole]
    warnings: list[str]  # why the size of a model is unknown
    contexts: int = 0  # bytes of CUDA on each device
    communicators: Mapping[str, int] = field(default_factory=dict)  # bytes of NCCL, by pool

    def known(self) -> list[RoleMemory]:
        """Return the memory of the roles whose size is known."""
        return [role.memory for role in self.roles if role.memory is not None]

    def pools(self, inline: bool = False) -> dict[str, list[RoleMemory]]:
        """Return the memory of the roles of each pool, as far as it is known.

        There is one pool if all are `inline` in this process.
        """
        pools: dict[str, list[RoleMemory]] = {}
        for role in self.roles:
            if role.memory is not None:
                pool = "this process" if inline else role.pool
                pools.setdefault(pool, []).append(role.memory)
        return pools

    def overhead(self, pool: str) -> int:
        """Return the bytes of CUDA and NCCL on each device of a pool."""
        return self.contexts + self.communicators.get(pool, 0)

    def peaks(self, inline: bool = False) -> dict[str, int]:
        """Return the largest number of bytes on a device of each pool: see `pools`."""
        pools = self.pools(inline)
        return {pool: peak_of(roles) + self.overhead(pool) for pool, roles in pools.items()}


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
    is_client = config.actor_rollout_ref.rollout.is_client
    for role, name, model in _models(config, needs, references or {}):
        if role is ROLLOUT and is_client:
            continue
        pool = role.pool(config.trainer.placement)
        assert pool is not None, f"the role {role.name} is built, so it has a pool"
        storage = _storage(role, config, devices, ranks[pool])
        memory: RoleMemory | None = None
        try:
            size = (size_of or read_size)(model, role)
            engine = EngineMemory()
            if role is engine_role(config, needs) and not is_client:
                engine = _engine(config, devices, ranks[pool], needs, size, storage)
            work = _work(role, config, devices.kind, ranks[pool], needs, engine)
            memory = role_memory(name, size, storage, work)
        except UnknownSizeError as error:
            warnings.append(error.problems[0].message)
        roles.append(PlannedRole(role, pool, storage, memory))
    warnings = list(dict.fromkeys(warnings))
    if devices.kind == "cpu":
        return MemoryPlan(roles, warnings)
    return MemoryPlan(roles, warnings, _CONTEXT, _communicators(config, ranks, needs))


def _communicators(config: schema.Config, ranks: Mapping[str, int], needs: Needs) -> dict[str, int]:
    """Return the bytes of NCCL's buffers on a GPU of each pool.

    A group of all ranks, those of the dimensions of meshes and engines, and that of weight syncs.
    """
    found = {pool: _COMMUNICATOR * (number > 1) for pool, number in ranks.items()}
    for role in built_roles(config, needs):
        fsdp = role.fsdp(config)
        pool = role.pool(config.trainer.placement) or ""
        if fsdp is not None:
            tensor = fsdp.tensor_model_parallel_size
            stages = fsdp.pipeline_model_parallel_size
            rest = ranks[pool] // tensor // stages
            shards = rest if fsdp.fsdp_size == -1 else min(rest, fsdp.fsdp_size)
            dimensions = (
                tensor,
                stages,
                rest // max(1, shards),
                fsdp.ulysses_sequence_parallel_size,
            )
            several = sum(size > 1 for size in dimensions)
            found[pool] += _COMMUNICATOR * (several + (several > 0 and shards > 1))
    engine = engine_role(config, needs)
    rollout = config.actor_rollout_ref.rollout
    pool = rollout_pool(config, needs)
    actors = ACTOR.pool(config.trainer.placement) or ""
    if engine is ACTOR and rollout.tensor_model_parallel_size > 1:
        found[actors] += _COMMUNICATOR
    if pool is not None and rollout.checkpoint_engine.backend != "object_store":
        found[pool] += _COMMUNICATOR * (not rollout.is_client)
        found[actors] += _COMMUNICATOR
    return found


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


def _storage(role: Role, config: schema.Config, devices: Devices, num_ranks: int) -> Storage:
    """Return how the model of `role` is stored on each of `num_ranks` devices."""
    compute = compute_dtype(role.model(config), devices.kind, devices.has_bf16)
    fsdp = role.fsdp(config)
    if fsdp is None:  # an engine in a separate pool
        tensor = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        return replace(Storage.unsharded(compute), tensor=tensor)
    master = master_dtype(fsdp) if role.learns else compute
    return Storage.from_config(master, compute, num_ranks, fsdp, devices.kind)


def _work(
    role: Role,
    config: schema.Config,
    device: str,
    num_ranks: int,
    needs: Needs,
    engine: EngineMemory,
) -> Work:
    """Return the largest micro-batch of `role` on one rank.

    That is the token budget, or fewer tokens where a rank does not have as many, but at least one
    row of the longest length, or the rank's slice of it.
    """
    data = config.data
    n = rows_per_prompt(config, needs)
    if role.passes is None:
        return Work(0, False, False, engine)
    model = role.model(config)
    longest = data.max_prompt_length + data.max_response_length
    prompts = role.learner(config).ppo_mini_batch_size if role.learns else data.train_batch_size
    max_rows = role.max_rows(config)
    fsdp = role.fsdp(config)
    slices = 1
    stages = 1
    if fsdp is not None:
        slices = fsdp.ulysses_sequence_parallel_size
        stages = fsdp.pipeline_model_parallel_size
    budget = role.max_tokens(config) * slices if max_rows is None else max_rows * longest
    rows = ceil_div(prompts * n * role.ranks_per_row(config), num_ranks)
    tokens = max(longest, min(budget, ceil_div(rows, stages) * longest))
    num_parts = min(ceil_div(rows * longest, tokens), PARTS_PER_STAGE * stages)
    # Hidden states come in and go out, or have a gradient; between two stages that comes in, too.
    copies = 2
    if stages == 1:
        copies = 0
    elif role.learns and stages > 2:
        copies = 3
    in_flight = stages
    if fsdp and stages > 1 and fsdp.pipeline_schedule == "gpipe":
        in_flight = num_parts
    return Work(
        tokens=ceil_div(tokens, slices),
        learns=role.learns,
        in_flight=in_flight,
        passed_on=copies * num_parts,
        recomputed=model.enable_gradient_checkpointing
        and model.gradient_checkpointing_every_n_layers,
        offloads=model.enable_activation_offload and device != "cpu",
        state_bytes=bytes_per_parameter(role.learner(config).optim) if role.learns else None,
        has_logits=role.kind == "policy",
        engine=engine,
        averages=role is ACTOR and Needs.AVERAGE in needs,
        saves=config.trainer.saves,
    )


def _engine(
    config: schema.Config,
    devices: Devices,
    num_ranks: int,
    needs: Needs,
    size: ModelSize,
    storage: Storage,
) -> EngineMemory:
    """Return the memory of the engine of each rank of a role."""
    rollout = config.actor_rollout_ref.rollout
    data = config.data
    compute = storage.compute
    ranks = rollout.tensor_model_parallel_size
    is_vllm = plans_vllm(rollout.name, devices.kind)
    # The weights of an engine in a separate pool are those of its role.
    copies = storage.wrapped or size.num_trained < size.num_parameters or is_vllm
    alone = rollout_pool(config, needs) is not None
    has_latent = is_vllm and size.latent > 0  # which each rank has
    per_token = size.latent * ranks if has_latent else size.cached
    longest = data.max_prompt_length + data.max_response_length
    rows, tokens = _cached_rows(config, devices.kind, num_ranks, needs)
    engine = EngineMemory(
        ceil_div(size.num_parameters * compute, ranks) if copies and not alone else 0,
        ceil_div(per_token * tokens * compute + size.states * rows * _STATE, ranks),
        ceil_div(per_token * longest * compute + size.states * _STATE, ranks),
        # On a CPU engines keep no cache, with or without the setting.
        keeps_cache=not rollout.free_cache_engine and devices.kind != "cpu",
    )
    if not is_vllm:
        return engine
    from rlctl.runtime.planning.engine_memory import vllm_memory

    memory = devices.memory
    share = None if memory is None else int(rollout.memory_fraction(alone) * memory)
    return vllm_memory(size, compute, rollout, engine, share)


def _cached_rows(
    config: schema.Config, device: str, num_ranks: int, needs: Needs
) -> tuple[int, int]:
    """Return the responses of the longest length that an engine caches at a time, and the tokens.

    The tokens of a prompt count once.
    """
    data = config.data
    rollout = config.actor_rollout_ref.rollout
    n = rows_per_prompt(config, needs)
    parts = ceil_div(num_ranks, rollout.tensor_model_parallel_size)
    prompts = min(
        ceil_div(data.train_batch_size, parts), max(1, rows_at_a_time(rollout, device) // n)
    )
    return prompts * n, prompts * (data.max_prompt_length + n * data.max_response_length)
