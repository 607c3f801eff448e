"""Ranks that split layers give the gradient, metrics, weights and state of one process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlctl.runtime.model.lora import merged_parameters
from rlctl.runtime.model.vocabulary import Vocabulary
from rlctl.runtime.ops import sum_of_squared_probs
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.background import await_written, begin_writing
from tests.distributed.ranks import on_ranks, rank_info
from tests.distributed.test_gradient import gradient
from tests.distributed.test_state import actor, update, weights
from tests.models import write_tiny_model

ROLES = ("actor", "critic", "distill")
TOLERANCE = 5e-6  # ranks split the sums of matrix products, so float32 rounds them otherwise
NUM_RANKS = 4


def mesh(tensor: int, sequence: int = 1) -> tuple[str, ...]:
    return tuple(
        f"{section}.fsdp_config.{key}={size}"
        for section in ("actor_rollout_ref.actor", "critic")
        for key, size in (
            ("tensor_model_parallel_size", tensor),
            ("ulysses_sequence_parallel_size", sequence),
        )
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "qwen3", vocab_size=264)  # even; with norms of each head
    return folder


class Found(NamedTuple):
    gradients: list[Tensor]  # of each role, by two groups of two ranks
    squares: Tensor  # Σ p² of random logits
    best: Tensor  # their three largest
    all_ranks: tuple[Tensor, dict[str, float]]  # of the actor, by slices of rows and layers
    saved: Tensor
    engine: dict[str, Tensor]  # weights for the rollout engine
    updated: Tensor  # after the save
    resumed: Tensor  # after the same update of what was saved


def on_mesh(where: RankInfo, model: str, folder: Path) -> Found:
    two = [gradient(where, model, role, "token-mean", 2, mesh(2))[0] for role in ROLES]
    four = gradient(where, model, "actor", "token-mean", 1, mesh(2, 2))
    group = torch.distributed.group.WORLD
    assert group is not None
    vocabulary, own = Vocabulary(group), logits().chunk(NUM_RANKS, -1)[where.rank]
    squares, best = vocabulary.sum_of_squared_probs(own, 0.7), vocabulary.top_k(own, 3)
    first = actor(where, model, mesh(2))
    update(first)
    first.save(folder)
    await_written([folder], timeout_s=60)
    saved, engine = weights(first), dict(merged_parameters(first.policy.hf))
    update(first)
    second = actor(where, model, mesh(2))
    second.load(folder)
    update(second)
    return Found(two, squares, best, four, saved, engine, weights(first), weights(second))


def logits() -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * 3


def test_ranks_that_split_layers_do_not_change_the_numbers(model: Path, tmp_path: Path) -> None:
    begin_writing(tmp_path)
    folder = tmp_path / "state"
    found = on_ranks(NUM_RANKS, on_mesh, str(model), folder)

    expected = [gradient(rank_info(), str(model), role, "token-mean", 1) for role in ROLES]
    loaded = actor(rank_info(), str(model))
    loaded.load(folder)
    alone, engine = weights(loaded), dict(merged_parameters(loaded.policy.hf))
    for rank in found:
        for mine, (whole, _) in zip(rank.gradients, expected, strict=True):
            assert (whole - mine).norm() <= TOLERANCE * whole.norm()
        torch.testing.assert_close(rank.squares, sum_of_squared_probs(logits(), 0.7))
        assert torch.equal(rank.best, logits().topk(3).indices)
        whole, metrics = expected[0]
        assert (whole - rank.all_ranks[0]).norm() <= TOLERANCE * whole.norm()
        assert rank.all_ranks[1] == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        assert torch.equal(rank.saved, alone)
        assert rank.engine.keys() == engine.keys()
        assert all(torch.equal(rank.engine[name], engine[name]) for name in engine)
        assert torch.equal(rank.updated, rank.resumed)
        assert not torch.equal(rank.updated, rank.saved)
