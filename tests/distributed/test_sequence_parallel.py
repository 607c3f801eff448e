"""Ranks that share rows (Ulysses) give the gradient, metrics and state of one process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlctl.runtime.model.attention import Packing
from rlctl.runtime.model.kernels import Reach
from rlctl.runtime.model.sequence_parallel import SequenceGroup
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.background import begin_writing
from tests.distributed.meshes import NUM_RANKS, Trained, check_trained, mesh, train
from tests.distributed.ranks import on_ranks, rank_info
from tests.distributed.test_gradient import gradient
from tests.numerics.test_reward_model import gradient as reward_gradient

ROLES = ("actor", "critic", "distill", "sft", "dpo")
LORA = "actor_rollout_ref.model.lora_rank=4"


class Found(NamedTuple):
    gradients: list[Tensor]  # of each role, by two ranks for each row
    adapters: Tensor  # of the actor's LoRA adapters, by two ranks for each row
    all_ranks: tuple[Tensor, dict[str, float]]  # of the actor, by all ranks for each row
    attention: list[Tensor]
    reward: Tensor  # the gradient of a reward model
    trained: Trained


def on_mesh(where: RankInfo, model: str, folder: Path) -> Found:
    two = [gradient(where, model, role, "token-mean", 2, mesh(1, 2))[0] for role in ROLES]
    adapters, _ = gradient(where, model, "actor", "token-mean", 2, (*mesh(1, 2), LORA))
    four = gradient(where, model, "actor", "token-mean", 1, mesh(1, NUM_RANKS))
    group = torch.distributed.group.WORLD
    assert group is not None
    attention = attend(SequenceGroup(group, where.rank, NUM_RANKS))
    reward, _ = reward_gradient(where, model, None, mesh(1, 2))
    return Found(two, adapters, four, attention, reward, train(where, model, folder, mesh(1, 2)))


def attend(group: SequenceGroup | None) -> list[Tensor]:
    """Return the output for all tokens of attention with windows and sinks, and its gradients."""
    lengths = torch.tensor([5, 1, 8])
    num_tokens = int(lengths.sum())  # no multiple of the ranks
    draw = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, heads, 4) for heads in (12, 3, 3)]
    leaves = [torch.randn(shape, generator=draw) for shape in (*shapes, (12,))]
    for leaf in leaves:
        leaf.requires_grad_()
    query, key, value, sinks = leaves
    packing, tokens = Packing.from_lengths(lengths, "cpu"), torch.arange(num_tokens)
    reach = Reach(0.5, 3, sinks)
    if group is None:
        out = packing.attend(0, query, key, value, reach)
    else:
        own = group.slice(Sequences(tokens, packing, tokens, tokens, tokens[:3]))
        ids = own.sequences.ids  # of padding: 0
        part = own.sequences.packing.attend(0, query[ids], key[ids], value[ids], reach)
        out = own.join_tokens(part[own.sequences.predictors])
    (out * torch.randn(out.shape, generator=draw)).sum().backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if group is not None:
        for each in gradients:
            torch.distributed.all_reduce(each)
    return [out.detach(), *gradients]


@pytest.mark.soak
def test_ranks_that_share_rows_do_not_change_the_numbers(model: Path, tmp_path: Path) -> None:
    begin_writing(tmp_path)
    folder = tmp_path / "state"
    found = on_ranks(NUM_RANKS, on_mesh, str(model), folder)

    expected = [gradient(rank_info(), str(model), role, "token-mean", 1) for role in ROLES]
    adapters, _ = gradient(rank_info(), str(model), "actor", "token-mean", 1, (LORA,))
    attention = attend(None)
    reward, _ = reward_gradient(rank_info(), str(model), None)
    check_trained([rank.trained for rank in found], str(model), folder)
    for rank in found:
        for mine, (whole, _) in zip(rank.gradients, expected, strict=True):
            assert (whole - mine).norm() <= 1e-6 * whole.norm()
        assert (adapters - rank.adapters).norm() <= 1e-6 * adapters.norm() > 0
        whole, metrics = expected[0]
        assert (whole - rank.all_ranks[0]).norm() <= 1e-6 * whole.norm()
        assert rank.all_ranks[1] == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        for mine, whole in zip(rank.attention, attention, strict=True):
            torch.testing.assert_close(mine, whole)
        assert (reward - rank.reward).norm() <= 1e-6 * reward.norm() > 0
