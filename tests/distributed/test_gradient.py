"""The gradient of a mini-batch does not depend on the numbers of ranks and micro-batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.distill import Graded
from rlctl.runtime.algorithms.pair_losses import PairParams, pair_rows
from rlctl.runtime.batch import Ragged, Rollouts, Scored
from rlctl.runtime.model.sharding import full_tensor
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.dispatch import split
from rlctl.tracking.metrics import to_floats
from tests.configs import configured
from tests.distributed.ranks import on_ranks, rank_info
from tests.workers import LOSS, ROWS, actor_of, critic_of, experience, gradients

# Roles of the actor with another algorithm than PPO.
RECIPES = ("distill", "online_dpo", "raft", "sft", "dpo")


def experts(batch: Rollouts) -> Ragged:
    """Return 2 of 4 experts for each token in 2 layers; those of a prompt are equal in its rows."""

    def drawn(seed: int, num_tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(num_tokens, 2, 4, generator=generator).argsort(-1)[..., :2].to(torch.int8)

    lengths = batch.response_ids.lengths.tolist()
    rows = [
        torch.cat([drawn(int(prompt.sum()), len(prompt)), drawn(row, lengths[row])])
        for row, prompt in enumerate(batch.prompt_ids.rows())
    ]
    return Ragged.from_rows([torch.cat([row[:-1], 0 * row[-1:] - 1]) for row in rows])


def rows_of(role: str) -> Rollouts:
    """Return the rows that the role's update gets: those of pairs, those kept, or all."""
    batch = experience()
    if role == "replay":
        return dataclasses.replace(batch, routing=experts(batch))
    if role in ("online_dpo", "dpo"):
        fields = {each.name: getattr(batch, each.name) for each in dataclasses.fields(Scored)}
        first = torch.arange(6)
        now, ref = batch.old_log_probs.select(first), batch.ref_log_probs.select(first)
        pairs = torch.tensor([[0, 1], [3, 2], [5, 4], [4, 3]])
        return pair_rows(Scored(**fields).select(first), now, ref, pairs, PairParams())[0]
    if role == "distill":
        ids = batch.response_ids
        fields = {each.name: getattr(batch, each.name) for each in dataclasses.fields(Scored)}
        draw = torch.Generator().manual_seed(4)
        teacher = torch.randn(len(ids.values), 3, generator=draw).log_softmax(-1)
        graded = Graded(**fields, teacher_log_probs=ids.like(teacher))
        candidates = torch.randint(0, 60, teacher.shape, generator=draw)
        return dataclasses.replace(graded, candidates=ids.like(candidates))
    if role == "raft":
        return batch.select(torch.tensor([0, 3, 4, 5, 6]))  # an uneven number
    return batch


def gradient(
    where: RankInfo,
    model: str,
    role: str,
    mode: str,
    num_micro_batches: int,
    overrides: tuple[str, ...] = (),
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the gradient that an update passes to the optimizer, flat, and its metrics."""
    given = [f"actor_rollout_ref.model.path={model}", *LOSS]
    sizes = [f"actor_rollout_ref.actor.loss_agg_mode={mode}", *overrides]
    if num_micro_batches > 1:
        rows = ROWS // where.world_size // num_micro_batches
        for role_section in ("actor_rollout_ref.actor", "critic"):
            sizes.append(f"{role_section}.use_dynamic_bsz=false")
            sizes.append(f"{role_section}.ppo_micro_batch_size_per_gpu={max(1, rows)}")
    if role == "distill":
        given.append("actor_rollout_ref.ref.model.path=teacher")
    config = configured(role if role in RECIPES else "ppo", given, sizes)
    worker = (critic_of if role == "critic" else actor_of)(where, config)
    batch, ranks_per_row = rows_of(role), worker.learner.model.ranks_per_row
    parts = split(batch, where.world_size // ranks_per_row, balanced=True)
    mine = batch.chunk(parts)[where.rank // ranks_per_row]
    found, metrics = gradients(worker, mine)
    trained = {name for name, each in worker.learner.model.named_parameters() if each.requires_grad}
    assert found.keys() == trained
    return torch.cat([each.flatten() for each in found.values()]), metrics


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_do_not_change_the_gradient(model: Path, mode: str) -> None:
    whole, metrics = gradient(rank_info(), str(model), "actor", mode, 1)
    cut, cut_metrics = gradient(rank_info(), str(model), "actor", mode, 4)
    assert whole.norm() > 1e-3
    assert (whole - cut).norm() <= 1e-6 * whole.norm()
    assert cut_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)


CUTS = [
    (role, num_micro_batches)
    for role in ("actor", "critic", "online_dpo", "distill", "raft")
    for num_micro_batches in ((1, 4) if role == "actor" else (2,))
]


def gradients_of_cuts(where: RankInfo, model: str) -> list[torch.Tensor]:
    return [gradient(where, model, role, "token-mean", number)[0] for role, number in CUTS]


def test_two_ranks_do_not_change_the_gradient(model: Path) -> None:
    """FSDP2 on two gloo ranks against one process, with one and with several micro-batches."""
    whole = {role: gradient(rank_info(), str(model), role, "token-mean", 1)[0] for role, _ in CUTS}
    assert min(expected.norm() for expected in whole.values()) > 1e-3
    for of_rank in on_ranks(2, gradients_of_cuts, str(model)):
        for (role, number), cut in zip(CUTS, of_rank, strict=True):
            expected = whole[role]
            assert (expected - cut).norm() <= 1e-6 * expected.norm(), (role, number)


def test_an_update_returns_the_log_probs_before_it(model: Path) -> None:
    sizes = (
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
    )
    worker, batch = actor_of(rank_info(), compose("ppo", [*sizes, *LOSS]).config), experience()
    before = worker.compute_log_probs(batch).log_probs
    found, metrics = worker.update_with_log_probs(batch, lr=1e-2)
    after = worker.compute_log_probs(batch).log_probs
    assert torch.equal(found.log_probs.lengths, before.lengths)
    assert torch.allclose(found.log_probs.values, before.values, atol=1e-5)
    assert not torch.allclose(after.values, before.values, atol=1e-3)
    assert to_floats(metrics)["actor/skipped_updates"] == 0


def test_one_rank_on_a_cpu_trains_in_bfloat16_with_float32_weights(model: Path) -> None:
    overrides = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.dtype=bf16"]
    try:
        worker = actor_of(rank_info(), compose("ppo", [*overrides, *LOSS]).config)
        before = [full_tensor(each).clone() for each in worker.policy.parameters()]
        metrics = worker.update(experience(), lr=1e-2)
        after = [full_tensor(each) for each in worker.policy.parameters()]
    finally:
        torch.distributed.destroy_process_group()
    assert to_floats(metrics)["actor/skipped_updates"] == 0
    assert all(each.dtype == torch.float32 for each in after)
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
