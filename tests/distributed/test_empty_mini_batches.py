"""Mini-batches without an unmasked token, and with fewer rows than ranks.

The former change neither weights nor optimizer state.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.batch import Experience
from rlctl.runtime.budget import Budget
from rlctl.runtime.model.sharding import full_tensor, local_part
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.critic import CriticWorker
from rlctl.runtime.workers.dispatch import split
from rlctl.tracking.metrics import to_floats
from tests.distributed.ranks import on_ranks, rank_info
from tests.workers import LOSS, ROWS, actor_of, critic_of, experience

ROLES = ("actor", "critic", "sft")
Metrics = dict[str, float]


def build(where: RankInfo, model: str, role: str) -> ActorWorker | CriticWorker:
    overrides = [f"actor_rollout_ref.model.path={model}", *LOSS]
    config = compose("sft" if role == "sft" else "ppo", overrides).config
    return (critic_of if role == "critic" else actor_of)(where, config)


def state(worker: ActorWorker | CriticWorker) -> list[torch.Tensor]:
    """Return copies of the local weights and moments."""
    tensors = [*worker.learner.model.parameters()]
    tensors += [x for each in worker.learner.optimizer.state.values() for x in each.values()]
    return [local_part(each.detach()).clone() for each in tensors]


def masked(rows: list[int]) -> Experience:
    """Return the experience with all tokens of `rows` masked."""
    batch = experience()
    hit = torch.isin(batch.response_ids.row_of_token, torch.tensor(rows))
    mask = batch.response_mask.values.masked_fill(hit, 0.0)
    return replace(batch, response_mask=batch.response_mask.like(mask))


def updates(where: RankInfo, model: str, role: str) -> tuple[bool, Metrics, bool, Metrics]:
    """Update once, then with all rows masked, then with those of rank 0 masked.

    Returns whether the state was unchanged by the second and by the third, and their metrics.
    """
    worker = build(where, model, role)
    parts = split(experience(), where.world_size, balanced=True)

    def update(batch: Experience) -> Metrics:
        return to_floats(worker.update(batch.chunk(parts)[where.rank], lr=1e-2))

    update(experience())
    before = state(worker)
    empty = update(masked(list(range(ROWS))))
    between = state(worker)
    half = update(masked(parts[0].tolist() if where.world_size > 1 else [0, 1, 2]))
    after = state(worker)
    assert worker.learner.num_updates == 2, "those with an unmasked token"

    def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
        return len(first) > 3 and all(map(torch.equal, first, second))

    return same(before, between), empty, same(between, after), half


def few_rows(where: RankInfo, model: str, role: str) -> list[torch.Tensor]:
    """Return the weights after updates with 1 row, then with 3, each a micro-batch of its own."""
    worker = build(where, model, role)
    worker.budget = Budget("rows", 1, "rows")
    metrics = []
    for rows in ([1], [2, 3, 5]):
        batch = experience().select(torch.tensor(rows))
        part = batch.chunk(split(batch, where.world_size, balanced=True))[where.rank]
        if isinstance(worker, ActorWorker) and role == "actor":
            worker.infer_budget = worker.budget
            assert len(worker.compute_log_probs(part).log_probs) == len(part)
        metrics.append(to_floats(worker.update(part, lr=1e-2)))
    assert not any(math.isnan(value) for each in metrics for value in each.values())
    return [full_tensor(each).clone() for each in worker.learner.model.parameters()]


def of_all_roles(where: RankInfo, model: str) -> list[tuple[Any, list[torch.Tensor]]]:
    return [(updates(where, model, role), few_rows(where, model, role)) for role in ROLES]


@pytest.mark.soak
def test_mini_batches_without_tokens_take_no_step_and_ranks_may_lack_rows(model: Path) -> None:
    alone = of_all_roles(rank_info(), str(model))
    ranks = on_ranks(2, of_all_roles, str(model))
    for number, role in enumerate(ROLES):
        counter = f"{'critic' if role == 'critic' else 'actor'}/empty_mini_batches"
        results = [alone[number], *(of_rank[number] for of_rank in ranks)]
        assert [empty[counter] for (_, empty, _, _), _ in results] == [1.0, 1.0, 0.0], role
        for (unchanged, empty, stuck, half), weights in results:
            assert unchanged
            assert not any(map(math.isnan, empty.values()))
            assert not stuck
            assert counter not in half
            assert not any(map(math.isnan, half.values()))
            for one, other in zip(weights, alone[number][1], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
