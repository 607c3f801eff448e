"""What a start would do, as data: the same checks, the arithmetic of a step, where everything goes and what it takes. Writes nothing."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rlctl.files import free_space
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.roles import REFERENCE, is_adapter_base
from rlctl.recipes.unused_keys import report_unused_keys
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.data.tokenizer import render_prompt
from rlctl.runtime.model.load import compute_dtype, master_dtype
from rlctl.runtime.ops import ceil_div
from rlctl.runtime.planning.memory import (
    ModelSize,
    RoleMemory,
    Storage,
    UnknownSizeError,
    Work,
    device_memory,
    role_memory,
)
from rlctl.runtime.planning.plan import Plan, make_plan
from rlctl.runtime.planning.preflight import NUM_REWARD_ROWS
from rlctl.runtime.rollout.sampling_params import num_requests
from rlctl.tracking.fanout import preflight


@dataclass(frozen=True)
class Changed:
    """A value that a recipe or the command line set."""

    key: str
    value: Any
    where: str


@dataclass(frozen=True)
class Placed:
    """A role and the processes it lives in."""

    role: str
    pool: str
    processes: int
    device: str
    threads: int
    strategy: str


@dataclass(frozen=True)
class Updates:
    """One learning role's part of a step. The two numbers of micro-batches are of one update on one rank: for answers half as long as
    `data.max_response_length`, and as long; prompts are of the data's mean length.
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
    """From prompts to updates, and how many steps there are."""

    train_prompts: int
    dropped_prompts: int
    val_prompts: int
    mean_prompt_length: float
    prompts: int
    answers_a_prompt: int
    rows: int
    updates: list[Updates]
    steps_per_epoch: int
    total_steps: int


@dataclass(frozen=True)
class Disk:
    """Bytes of one checkpoint (the policy for export; weights and two moments of each learning role), and how many lie there at most."""

    checkpoint: int | None  # None: a model's size is not known beforehand
    num_checkpoints: int
    free: int


@dataclass(frozen=True)
class DryRun:
    """Everything that `--dry-run` says."""

    recipe: str
    changed: list[Changed]
    placement: list[Placed]
    batches: Batches
    memory: list[RoleMemory]
    pool_peaks: dict[
        str, int
    ]  # bytes on one device: what the roles of a pool hold together, and the largest passing need of one
    device_memory: int
    disk: Disk
    trackers: list[str]
    reward_functions: list[str]
    reward_rows: int
    prompt: str
    idle: list[str]


def dry_run(recipe: Recipe, *, inline: bool, strict: bool) -> DryRun:
    """Check everything that a start checks and report. Raises the same errors."""
    with tempfile.TemporaryDirectory(prefix="rlctl-") as scratch:
        plan = make_plan(recipe, inline, data_root=Path(scratch))
        idle = report_unused_keys(recipe, plan.roles, strict=strict)
        memory, peaks = _memory(plan)
    config, rows = plan.config, plan.loader.prompts.rows
    custom = config.reward.custom_reward_function
    last = {key: chain[-1] for key, chain in recipe.origins.items()}
    return DryRun(
        recipe=recipe.name,
        changed=[
            Changed(key, each.value, each.where) for key, each in last.items() if each.level > 1
        ],
        placement=_placement(plan),
        batches=_batches(plan),
        memory=memory,
        pool_peaks=peaks,
        device_memory=device_memory(
            plan.devices.kind, max(1, _processes(plan) // plan.devices.num_nodes)
        ),
        disk=_disk(plan, memory),
        trackers=[_tracker(name, config.trainer.tracking) for name in config.trainer.logger],
        reward_functions=[f"{custom.path}:{custom.name}"]
        if custom.path
        else list(config.reward.functions),
        reward_rows=min(NUM_REWARD_ROWS, len(rows)),
        prompt=render_prompt(
            plan.tokenizer, rows[0].prompt, **config.data.apply_chat_template_kwargs
        ),
        idle=idle,
    )


def _tracker(name: str, tracking: schema.Tracking) -> str:
    mode = preflight(name, tracking.modes.get(name))
    return f"{name} ({mode})" if mode else name


def _processes(plan: Plan) -> int:
    return 1 if plan.inline else sum(plan.pool_sizes.values())


def _pools(plan: Plan) -> dict[str, str]:
    """role -> pool, of the roles that live in pools."""
    placement = plan.config.trainer.placement
    pools = {
        "actor": placement.actor,
        "rollout": placement.rollout or "",
        "reference": placement.reference,
        "critic": placement.critic,
    }
    if is_adapter_base(REFERENCE, plan.config):
        del pools["reference"]
    return {role: pool for role, pool in pools.items() if role == "actor" or role in plan.roles}


def _placement(plan: Plan) -> list[Placed]:
    config, kind = plan.config, plan.devices.kind
    placed: list[Placed] = []
    for role, pool in _pools(plan).items():
        ranks = plan.pool_sizes[pool]
        strategy = (
            config.critic.strategy if role == "critic" else config.actor_rollout_ref.actor.strategy
        )
        if role == "rollout":
            how = "an engine in each process"
        else:
            how = strategy if _storage(plan, role).wrapped else "unsharded: one rank, one precision"
        placed.append(Placed(role, pool, ranks, kind, plan.num_threads, how))
    return placed


def _batches(plan: Plan) -> Batches:
    data, loader = plan.config.data, plan.loader
    grouped = Needs.GROUPS in plan.algorithm.needs
    n = plan.config.actor_rollout_ref.rollout.n if grouped else 1
    mean = fmean(map(len, loader.prompts.prompt_ids))
    learners = {"actor": plan.config.actor_rollout_ref.actor, "critic": plan.config.critic}
    return Batches(
        train_prompts=len(loader.prompts),
        dropped_prompts=loader.prompts.num_dropped,
        val_prompts=len(plan.validator.prompts) if plan.validator else 0,
        mean_prompt_length=mean,
        prompts=data.train_batch_size,
        answers_a_prompt=n,
        rows=data.train_batch_size * n,
        updates=[
            _updates(plan, role, learner, n, mean)
            for role, learner in learners.items()
            if role in _pools(plan)
        ],
        steps_per_epoch=loader.steps_per_epoch,
        total_steps=plan.num_steps,
    )


def _updates(
    plan: Plan, role: str, learner: schema.Actor | schema.Critic, n: int, mean_prompt: float
) -> Updates:
    data, size = plan.config.data, learner.ppo_mini_batch_size
    rows = size * n
    a_rank = rows // plan.pool_sizes[_pools(plan)[role]]
    max_rows = None if learner.use_dynamic_bsz else learner.ppo_micro_batch_size_per_gpu

    def micro(answer: float) -> int:
        fitting = max_rows or max(
            1, int(learner.ppo_max_token_len_per_gpu // (mean_prompt + answer))
        )
        return ceil_div(a_rank, fitting)

    epochs = (
        learner.ppo_epochs if Needs.GROUPS in plan.algorithm.needs else 1
    )  # others go through their rows once
    count = data.train_batch_size // size
    half, full = micro(data.max_response_length / 2), micro(data.max_response_length)
    return Updates(role, count, size, rows, a_rank, half, full, epochs, count * epochs)


def _model_of(plan: Plan, role: str) -> schema.Model:
    return plan.config.critic.model if role == "critic" else plan.config.actor_rollout_ref.model


def _storage(plan: Plan, role: str) -> Storage:
    actor_rollout = plan.config.actor_rollout_ref
    if role == "rollout":
        dtype = compute_dtype(actor_rollout.model, plan.devices.kind)
        return Storage(
            dtype.itemsize, dtype.itemsize, shards=1, wrapped=False, reshard=False, offload=False
        )
    sections = {
        "actor": actor_rollout.actor.fsdp_config,
        "reference": actor_rollout.ref.fsdp_config,
        "critic": plan.config.critic.fsdp_config,
    }
    fsdp, ranks = sections[role], plan.pool_sizes[_pools(plan)[role]]
    return Storage.of(
        master_dtype(fsdp), compute_dtype(_model_of(plan, role), plan.devices.kind), ranks, fsdp
    )


def _work(plan: Plan, role: str) -> Work:
    """The fullest micro-batch: the token budget, or fewer tokens where a rank does not have so many; never less than one longest row."""
    config = plan.config
    data, actor_rollout = config.data, config.actor_rollout_ref
    n = actor_rollout.rollout.n if Needs.GROUPS in plan.algorithm.needs else 1
    ranks, longest = (
        plan.pool_sizes[_pools(plan)[role]],
        data.max_prompt_length + data.max_response_length,
    )
    answers = (
        role == ("rollout" if plan.rollout_pool else "actor")
        and Needs.ENGINE in plan.algorithm.needs
    )
    kv_tokens = 0
    if answers:
        parts = ranks
        if plan.rollout_pool and actor_rollout.rollout.mode == "sync":  # one request at a time
            parts = num_requests(actor_rollout.rollout, data.train_batch_size, ranks)
        prompts = min(
            ceil_div(data.train_batch_size, parts), max(1, actor_rollout.rollout.max_num_seqs // n)
        )
        kv_tokens = prompts * (data.max_prompt_length + n * data.max_response_length)
    if role == "rollout":
        return Work(
            tokens=0, learns=False, checkpointing=False, has_logits=False, kv_tokens=kv_tokens
        )
    learner = {"actor": actor_rollout.actor, "critic": config.critic, "reference": None}[role]
    if learner is not None:
        rows, budget, max_rows = (
            learner.ppo_mini_batch_size * n,
            learner.ppo_max_token_len_per_gpu,
            learner.ppo_micro_batch_size_per_gpu,
        )
    else:
        rows, budget = data.train_batch_size * n, actor_rollout.ref.log_prob_max_token_len_per_gpu
        max_rows = actor_rollout.ref.log_prob_micro_batch_size_per_gpu
    dynamic = (
        config.critic.use_dynamic_bsz if role == "critic" else actor_rollout.actor.use_dynamic_bsz
    )
    if max_rows is not None and not dynamic:
        budget = max_rows * longest
    tokens = max(longest, min(budget, ceil_div(rows, ranks) * longest))
    checkpointing = _model_of(plan, role).enable_gradient_checkpointing
    return Work(tokens, learner is not None, checkpointing, role != "critic", kv_tokens)


def _memory(plan: Plan) -> tuple[list[RoleMemory], dict[str, int]]:
    memory: dict[str, RoleMemory] = {}
    for role in _pools(plan):
        try:
            size = ModelSize.of(_model_of(plan, role), "backbone" if role == "critic" else "policy")
        except UnknownSizeError:  # the plan has warned of it
            continue
        memory[role] = role_memory(role, size, _storage(plan, role), _work(plan, role))
    by_pool: dict[str, list[RoleMemory]] = {}
    for role, pool in _pools(plan).items():
        if role in memory:
            by_pool.setdefault("this process" if plan.inline else pool, []).append(memory[role])
    peaks = {
        pool: sum(each.held for each in roles) + max(each.passing for each in roles)
        for pool, roles in by_pool.items()
    }
    return list(memory.values()), peaks


def _disk(plan: Plan, memory: list[RoleMemory]) -> Disk:
    trainer = plan.config.trainer
    root = Path(trainer.default_local_dir or trainer.run_dir).expanduser().absolute()
    learning = {
        each.role: 3 * each.num_trained * _storage(plan, each.role).master
        for each in memory
        if each.role in ("actor", "critic")
    }
    export = sum(
        each.num_parameters * _storage(plan, each.role).master
        for each in memory
        if each.role == "actor"
    )
    known = all(role in learning for role in _pools(plan) if role in ("actor", "critic"))
    count = 0
    if trainer.save_freq > 0:
        count = ceil_div(plan.num_steps, trainer.save_freq)  # the last step is saved too
    if trainer.max_ckpt_to_keep is not None:  # and one more while it is written
        best = trainer.keep_best.k if trainer.keep_best.metric is not None else 0
        count = min(count, trainer.max_ckpt_to_keep + best + 1)
    return Disk(sum(learning.values()) + export if known else None, count, free_space(root))
