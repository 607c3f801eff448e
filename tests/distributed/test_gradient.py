"""The gradient of a mini-batch does not depend on the numbers of ranks and micro-batches.

Mini-batches may have no unmasked token, fewer rows than ranks, or images on one rank alone.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Experience, Ragged, Rollouts, Scored
from rlctl.runtime.base.budget import Budget
from rlctl.runtime.base.metrics import to_floats
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.sharding import full_tensor, local_part
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.critic import CriticWorker
from rlctl.runtime.workers.dispatch import split
from tests.configs import configured
from tests.distributed.ranks import on_ranks, rank_info
from tests.plugin_folders import is_there
from tests.tolerance import PASSES, assert_all_as_exact, assert_as_exact, float64
from tests.vlm import CHATS, prompts_of, write_vlm
from tests.workers import LOSS, ROWS, actor_of, critic_of, experience, gradients

# A policy loss with an aggregation of its own, beside a KL and an entropy with another one.
APART = ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo",)
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
        from rlctl.plugins.objectives.pair_losses import PairParams, pair_rows

        fields = {each.name: getattr(batch, each.name) for each in dataclasses.fields(Scored)}
        first = torch.arange(6)
        now, ref = batch.old_log_probs.select(first), batch.ref_log_probs.select(first)
        pairs = torch.tensor([[0, 1], [3, 2], [5, 4], [4, 3]])
        return pair_rows(Scored(**fields).select(first), now, ref, pairs, PairParams())[0]
    if role == "distill":
        from rlctl.plugins.objectives.distill import Graded

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


def exact_gradient(
    model: str,
    role: str,
    mode: str = "token-mean",
    overrides: tuple[str, ...] = (),
    num_micro_batches: int = 1,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return `gradient` of one process in float64."""
    with float64():
        settings = (*overrides, *PASSES)
        return gradient(rank_info(), model, role, mode, num_micro_batches, settings)


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        ("token-mean", ()),
        ("seq-mean-token-mean", ()),
        ("seq-mean-token-sum-norm", ()),
        pytest.param("token-mean", APART, marks=pytest.mark.plugin("objectives")),
        pytest.param("token-sum", APART, marks=pytest.mark.plugin("objectives")),
        pytest.param("seq-mean-token-sum-norm", APART, marks=pytest.mark.plugin("objectives")),
    ],
)
def test_micro_batches_do_not_change_the_gradient(
    model: Path, mode: str, loss: tuple[str, ...]
) -> None:
    whole, _ = gradient(rank_info(), str(model), "actor", mode, 1, loss)
    cut, _ = gradient(rank_info(), str(model), "actor", mode, 4, loss)
    exact, exact_metrics = exact_gradient(str(model), "actor", mode, loss)
    _, cut_metrics = exact_gradient(str(model), "actor", mode, loss, 4)
    assert whole.norm() > 1e-3
    assert_as_exact(cut, whole, exact)

    # Losses are exact; the sums of their metrics are float32.
    assert cut_metrics == pytest.approx(exact_metrics, rel=1e-6, abs=1e-12)


# (role, micro-batches, settings)
Cut = tuple[str, int, tuple[str, ...]]
CUTS: list[Cut] = [("actor", 1, ()), ("actor", 4, ()), ("critic", 2, ())]
if is_there("objectives"):
    CUTS += [(role, 2, ()) for role in ("online_dpo", "distill", "raft")]
    CUTS.append(("actor", 4, APART))


def gradients_of_cuts(where: RankInfo, model: str) -> list[torch.Tensor]:
    return [
        gradient(where, model, role, "token-mean", number, loss)[0] for role, number, loss in CUTS
    ]


def test_two_ranks_do_not_change_the_gradient(model: Path) -> None:
    """FSDP2 on two gloo ranks against one process, with one and with several micro-batches."""
    kinds = {(role, loss) for role, _, loss in CUTS}
    whole = {
        (role, loss): gradient(rank_info(), str(model), role, "token-mean", 1, loss)[0]
        for role, loss in kinds
    }
    exact = {
        (role, loss): exact_gradient(str(model), role, overrides=loss)[0] for role, loss in kinds
    }
    assert min(expected.norm() for expected in whole.values()) > 1e-3
    for of_rank in on_ranks(2, gradients_of_cuts, str(model)):
        for (role, number, loss), cut in zip(CUTS, of_rank, strict=True):
            assert_as_exact(cut, whole[role, loss], exact[role, loss], f"{role} {number} {loss}")


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
    with float64():
        exact = actor_of(rank_info(), configured("ppo", [*sizes, *LOSS], PASSES))
        exact_log_probs = exact.compute_log_probs(batch).log_probs.values.double()
    assert_as_exact(found.log_probs.values, before.values, exact_log_probs)
    assert not torch.allclose(after.values, before.values, atol=1e-3)
    assert to_floats(metrics)["actor/skipped_updates"] == 0


def test_one_rank_on_a_cpu_trains_in_bfloat16_with_float32_weights(model: Path) -> None:
    overrides = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.dtype=bfloat16"]
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


OF_ROW = (0, 0, 1, 3, 2, 2, 2, 2)  # chats; the last four rows have no images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vlm("qwen2_5_vl", tmp_path_factory.mktemp("vlm"))


def batch_of(folder: Path) -> Experience:
    batch, prompts = experience(), prompts_of(folder)
    ids = batch.response_ids.values
    return replace(
        batch,
        prompt_ids=Ragged.from_rows([prompts[i] for i in OF_ROW], torch.int64),
        response_ids=batch.response_ids.like(torch.where(ids < 20, ids + 20, ids)),
        images=[CHATS[i][1] for i in OF_ROW],
    )


def image_gradients(
    where: RankInfo, folder: str, frozen: str, rows: str, *more: str
) -> dict[str, torch.Tensor]:
    """Return the gradients of an update with images; micro-batches have at most `rows` rows."""
    given = [f"actor_rollout_ref.model.path={folder}", *LOSS]
    sizes = [
        f"actor_rollout_ref.actor.freeze_vision_tower={frozen}",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={rows}",
        *more,
    ]
    worker = actor_of(where, configured("ppo", given, sizes))
    mine = torch.arange(8).tensor_split(where.world_size)[where.rank]
    return gradients(worker, batch_of(Path(folder)).select(mine))[0]


@pytest.mark.parametrize("frozen", ["true", "false"])
def test_ranks_and_micro_batches_change_nothing(folder: Path, frozen: str) -> None:
    whole = image_gradients(rank_info(), str(folder), frozen, "8")
    cut = image_gradients(rank_info(), str(folder), frozen, "2")
    (first, second) = on_ranks(2, image_gradients, str(folder), frozen, "2")
    with float64():
        exact = image_gradients(rank_info(), str(folder), frozen, "8", *PASSES)
    assert any("visual" in name for name in whole) is (frozen == "false")
    recompute = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    recomputed = image_gradients(rank_info(), str(folder), frozen, "8", recompute)
    for other in (cut, recomputed, first, second):
        assert_all_as_exact(other, whole, exact)


ROLES = ("actor", "critic", "sft")
Metrics = dict[str, float]


def build(where: RankInfo, model: str, role: str) -> ActorWorker | CriticWorker:
    overrides = [f"actor_rollout_ref.model.path={model}", *LOSS, *PASSES]
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
    with float64():
        exact = of_all_roles(rank_info(), str(model))
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
            for each in zip(weights, alone[number][1], exact[number][1], strict=True):
                assert_as_exact(*each)
