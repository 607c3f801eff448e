"""Batch arithmetic of a step: from prompts to optimizer updates. All sizes are numbers of rows."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.recipes.roles import Role, needed_roles
from rlctl.recipes.schema import RewardModel
from rlctl.runtime.algorithms.base import Needs, rows_per_prompt
from rlctl.runtime.ops import ceil_div
from rlctl.runtime.planning.plan import Plan


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
    data, loader, needs = plan.config.data, plan.loader, plan.algorithm.needs
    n = rows_per_prompt(plan.config, needs)
    mean = loader.prompts.mean_length
    learning = [each for each in needed_roles(plan.config, needs) if each.learns]
    return Batches(
        train_prompts=len(loader.prompts),
        dropped_prompts=loader.prompts.num_dropped,
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
    config, learner = plan.config, role.learner(plan.config)
    size, rows = learner.ppo_mini_batch_size, learner.ppo_mini_batch_size * n
    num_ranks = plan.pool_sizes[role.pool(config.trainer.placement) or ""]
    rows_per_rank = rows * role.ranks_per_row(config) // num_ranks
    max_rows, fsdp = role.max_rows(config), role.fsdp(config)
    max_tokens = role.max_tokens(config) * (fsdp.ulysses_sequence_parallel_size if fsdp else 1)
    stages = fsdp.pipeline_model_parallel_size if fsdp else 1  # each has one to work on

    def micro_batches(response: float) -> int:
        fitting = int(max_tokens // (mean_prompt + response))
        return max(stages, ceil_div(rows_per_rank, max_rows or max(1, fitting)))

    count = config.data.train_batch_size // size
    samples = Needs.GROUPS in plan.algorithm.needs
    epochs = 1 if isinstance(learner, RewardModel) or not samples else learner.ppo_epochs
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
