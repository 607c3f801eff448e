"""Report of `--dry-run`: the checks of a start, batch sizes, placement, memory and disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.role_table import ACTOR, CRITIC, Role, needed_roles
from rlctl.recipes.schema import RewardModel
from rlctl.recipes.unused_keys import report_unused_keys
from rlctl.runtime.algorithms.base import Needs, rows_per_prompt
from rlctl.runtime.base.ops import ceil_div
from rlctl.runtime.data.tokenizer import render_prompt
from rlctl.runtime.planning.capacity import host_bytes, memory_of
from rlctl.runtime.planning.disk import Disk, disk_of
from rlctl.runtime.planning.memory import RoleMemory
from rlctl.runtime.planning.mesh import draw_mesh
from rlctl.runtime.planning.plan import Plan, make_plan
from rlctl.runtime.planning.reward_check import NUM_REWARD_ROWS
from rlctl.runtime.rewards.functions import RewardSpec
from rlctl.runtime.rewards.specs import reward_specs
from rlctl.tracking.loggers import preflight


@dataclass(frozen=True)
class Updates:
    """Updates of one learning role in a step.

    Micro-batches are counted per update and rank, for prompts of the mean length and responses of
    half of `data.max_response_length` or all of it.
    """

    role: str
    mini_batches: int
    prompts: int
    rows: int
    rows_a_rank: int
    micro_batches_half: int
    micro_batches_full: int
    epochs: int
    updates: int


@dataclass(frozen=True)
class Batches:
    """Numbers of prompts, rows, updates and steps."""

    train_prompts: int
    dropped_prompts: int
    skipped_rows: Mapping[str, int]  # by reason: data.skip_invalid
    val_prompts: int
    mean_prompt_length: float
    prompts: int
    answers_a_prompt: int
    rows: int
    updates: list[Updates]
    steps_per_epoch: int
    total_steps: int


def plan_batches(plan: Plan) -> Batches:
    """Return the batch sizes of a step and the number of steps."""
    data = plan.config.data
    loader = plan.loader
    needs = plan.algorithm.needs
    n = rows_per_prompt(plan.config, needs)
    mean = loader.prompts.mean_length
    learning = [role for role in needed_roles(plan.config, needs) if role.learns]
    return Batches(
        train_prompts=len(loader.prompts),
        dropped_prompts=loader.prompts.num_dropped,
        skipped_rows=dict(loader.prompts.skipped),
        val_prompts=len(plan.validator.prompts) if plan.validator else 0,
        mean_prompt_length=mean,
        prompts=data.train_batch_size,
        answers_a_prompt=n,
        rows=data.train_batch_size * n,
        updates=[_updates(plan, role, n, mean) for role in learning],
        steps_per_epoch=loader.steps_per_epoch,
        total_steps=plan.num_steps,
    )


def _updates(plan: Plan, role: Role, n: int, mean_prompt: float) -> Updates:
    config = plan.config
    learner = role.learner(plan.config)
    size = learner.ppo_mini_batch_size
    rows = learner.ppo_mini_batch_size * n
    num_ranks = plan.pool_sizes[role.pool(config.trainer.placement) or ""]
    rows_per_rank = rows * role.ranks_per_row(config) // num_ranks
    max_rows = role.max_rows(config)
    fsdp = role.fsdp(config)
    max_tokens = role.max_tokens(config)
    stages = 1  # each has a micro-batch to work on
    if fsdp is not None:
        max_tokens *= fsdp.ulysses_sequence_parallel_size
        stages = fsdp.pipeline_model_parallel_size

    def micro_batches(response: float) -> int:
        fitting = int(max_tokens // (mean_prompt + response))
        return max(stages, ceil_div(rows_per_rank, max_rows or max(1, fitting)))

    count = config.data.train_batch_size // size
    samples = Needs.GROUPS in plan.algorithm.needs
    epochs = 1
    if samples and not isinstance(learner, RewardModel):
        epochs = learner.ppo_epochs
    longest = config.data.max_response_length
    return Updates(
        role=role.name,
        mini_batches=count,
        prompts=size,
        rows=rows,
        rows_a_rank=rows_per_rank,
        micro_batches_half=micro_batches(longest / 2),
        micro_batches_full=micro_batches(longest),
        epochs=epochs,
        updates=count * epochs,
    )


@dataclass(frozen=True)
class Changed:
    """Value set by a recipe or on the command line."""

    key: str
    value: Any
    where: str


@dataclass(frozen=True)
class Placed:
    """Role and the processes that it runs in."""

    role: str
    pool: str
    processes: int
    device: str
    threads: int
    strategy: str


@dataclass(frozen=True)
class DryRun:
    """Contents of the report."""

    recipe: str
    changed: list[Changed]
    placement: list[Placed]
    batches: Batches
    memory: list[RoleMemory]
    pool_peaks: dict[str, int]  # bytes on one device
    overheads: dict[str, int]  # bytes of CUDA and NCCL, which are in the peaks
    device_memory: int | None  # None: of GPUs that only the cluster knows
    host: int  # bytes of the host memory of a node: see `host_bytes`
    disk: Disk
    trackers: list[str]
    reward_functions: list[str]
    reward_rows: int
    prompt: str
    idle: list[str]


def dry_run(recipe: Recipe, *, inline: bool, strict: bool) -> DryRun:
    """Run the checks of a start and return the report. Raises the same errors; writes nothing."""
    plan = make_plan(recipe, inline)
    unused = report_unused_keys(recipe, plan.roles, strict=strict)
    config = plan.config
    rows = plan.loader.prompts.rows
    specs = reward_specs(config.reward, plan.data_sources)
    last = {key: chain[-1] for key, chain in recipe.origins.items()}
    processes = 1 if plan.inline else sum(plan.pool_sizes.values())
    return DryRun(
        recipe=recipe.name,
        changed=[
            Changed(key, origin.value, origin.where)
            for key, origin in last.items()
            if origin.level > 1
        ],
        placement=_placement(plan),
        batches=plan_batches(plan),
        memory=plan.memory.known(),
        pool_peaks=plan.memory.peaks(plan.inline),
        overheads={pool: plan.memory.overhead(pool) for pool in plan.memory.pools(plan.inline)},
        device_memory=memory_of(plan.devices, processes),
        host=host_bytes(plan.memory, plan.devices, plan.pool_sizes),
        disk=disk_of(plan),
        trackers=[_tracker(name, config.trainer.tracking) for name in config.trainer.logger],
        reward_functions=[_function(spec) for spec in specs],
        reward_rows=sum(
            min(NUM_REWARD_ROWS, count)
            for count in Counter(row.data_source for row in plan.scored_rows).values()
        ),
        prompt=render_prompt(
            plan.tokenizer, rows[0].prompt, **config.data.apply_chat_template_kwargs
        ),
        idle=unused,
    )


def _tracker(name: str, tracking: schema.Tracking) -> str:
    mode = preflight(name, tracking.modes.get(name), tracking.params)
    if mode:
        return f"{name} ({mode})"
    return name


def _function(spec: RewardSpec) -> str:
    if spec.sources:
        return f"{spec.function} for {', '.join(sorted(spec.sources))}"
    return spec.function


def _placement(plan: Plan) -> list[Placed]:
    placed: list[Placed] = []
    compiled = plan.config.actor_rollout_ref.actor.use_torch_compile
    for planned in plan.memory.roles:
        ranks = plan.pool_sizes[planned.pool]
        device = plan.devices.kind
        if planned.role.fsdp_key is None:
            size = plan.config.actor_rollout_ref.rollout.tensor_model_parallel_size
            strategy = "an engine in each process"
            if size > 1:
                strategy = f"{ranks // size} engines of {size} processes each"
                nodes = len(plan.engine_bundles)
                if nodes > 1:
                    strategy += f" on {nodes} nodes"
        else:
            strategy = "unsharded: one rank, one precision"
            if planned.storage.wrapped:
                strategy = "fsdp2"
            fsdp = planned.role.fsdp(plan.config)
            if fsdp is not None and (mesh := draw_mesh(fsdp, ranks)):
                strategy += f", {mesh}"
            if compiled and planned.role.kind in (ACTOR.kind, CRITIC.kind):
                strategy += ", compiled layers"
        placed.append(
            Placed(planned.role.name, planned.pool, ranks, device, plan.num_threads, strategy)
        )
    return placed
