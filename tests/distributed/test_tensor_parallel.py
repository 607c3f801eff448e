"""Ranks that split layers give the gradient, metrics, weights and state of one process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlctl.runtime.model.vocabulary import Vocabulary
from rlctl.runtime.ops import sum_of_squared_probs
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.background import begin_writing
from tests.distributed.meshes import (
    EXACT,
    NUM_RANKS,
    PASSES,
    Trained,
    check_trained,
    float64,
    mesh,
    train,
)
from tests.distributed.ranks import on_ranks, rank_info
from tests.distributed.test_gradient import gradient
from tests.models import write_tiny_model
from tests.numerics.test_reward_model import gradient as reward_gradient

ROLES = ("actor", "critic", "distill", "dpo")
# Roles on meshes whose ranks all have the same rows.
EXACT_MESHES = (("actor", mesh(4)), ("critic", mesh(2, 2)))
# Of float32: ranks split the sums of matrix products, which are then rounded otherwise.
TOLERANCE = 5e-6
LORA = ("actor_rollout_ref.model.lora_rank=4", *PASSES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # With norms of each head; four ranks divide the vocabulary and the KV heads.
    write_tiny_model(folder, "qwen3", vocab_size=264, num_key_value_heads=4)
    return folder


class Found(NamedTuple):
    exact: list[Tensor]  # gradients in float64, by ranks that all have the same rows
    gradients: list[Tensor]  # of each role, by two groups of two ranks
    reward: Tensor  # of a reward model, by slices of rows and layers
    squares: Tensor  # Σ p² of random logits
    best: Tensor  # their three largest
    rounded: tuple[Tensor, dict[str, float]]  # of the actor in float32, by slices of both
    trained: Trained
    adapters: Trained  # in float64


def on_mesh(where: RankInfo, model: str, folder: Path) -> Found:
    with float64():
        exact = [
            gradient(where, model, role, "token-mean", 1, (*each, *PASSES))[0]
            for role, each in EXACT_MESHES
        ]
        settings = (*mesh(2), *PASSES)
        gradients = [gradient(where, model, role, "token-mean", 2, settings)[0] for role in ROLES]
        reward = reward_gradient(where, model, None, (*mesh(2, 2), *PASSES))[0]
        adapters = train(where, model, folder / "adapters", (*mesh(2), *LORA))
    rounded = gradient(where, model, "actor", "token-mean", 1, mesh(2, 2))
    group = torch.distributed.group.WORLD
    assert group is not None
    vocabulary, own = Vocabulary(group), logits().chunk(NUM_RANKS, -1)[where.rank]
    squares, best = vocabulary.sum_of_squared_probs(own, 0.7), vocabulary.top_k(own, 3)
    trained = train(where, model, folder / "whole", mesh(2))
    return Found(exact, gradients, reward, squares, best, rounded, trained, adapters)


def logits() -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.soak
def test_ranks_that_split_layers_do_not_change_the_numbers(model: Path, tmp_path: Path) -> None:
    begin_writing(tmp_path)
    found = on_ranks(NUM_RANKS, on_mesh, str(model), tmp_path)

    whole, metrics = gradient(rank_info(), str(model), "actor", "token-mean", 1)
    check_trained([rank.trained for rank in found], str(model), tmp_path / "whole")
    with float64():
        alone = [gradient(rank_info(), str(model), each, "token-mean", 1, PASSES) for each in ROLES]
        alone_reward = reward_gradient(rank_info(), str(model), None, PASSES)[0]
        adapters = train(rank_info(), str(model), tmp_path / "alone", LORA)
        check_trained([each.adapters for each in found], str(model), tmp_path / "adapters", LORA)
    for rank in found:
        assert (whole - rank.rounded[0]).norm() <= TOLERANCE * whole.norm()
        assert rank.rounded[1] == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        for mine, (role, _) in zip(rank.exact, EXACT_MESHES, strict=True):
            expected = alone[ROLES.index(role)][0]
            assert (expected - mine).norm() <= EXACT * expected.norm()
        for mine, (expected, _) in zip(rank.gradients, alone, strict=True):
            assert (expected - mine).norm() <= 1e-6 * expected.norm() > 0
        assert (alone_reward - rank.reward).norm() <= 1e-6 * alone_reward.norm() > 0
        torch.testing.assert_close(rank.squares, sum_of_squared_probs(logits(), 0.7))
        assert torch.equal(rank.best, logits().topk(3).indices)
        # After two updates of 1e-3 each: of A, the first gradient is zero.
        for mine, expected in zip(rank.adapters[2:], adapters[2:], strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)
        for name, expected in adapters.engine.items():
            torch.testing.assert_close(rank.adapters.engine[name], expected, rtol=0, atol=1e-6)
