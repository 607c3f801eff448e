"""Experts divided over ranks give the gradient and state of one process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.background import await_written, begin_writing
from tests.distributed.ranks import on_ranks, rank_info
from tests.distributed.test_gradient import gradient
from tests.distributed.test_state import actor, update, weights
from tests.models import mixture_model, tiny_tokenizer

NUM_RANKS = 4
FSDP = "actor_rollout_ref.actor.fsdp_config"


def mesh(experts: int, *more: str) -> tuple[str, ...]:
    sizes = f"fsdp_size={experts}", f"expert_model_parallel_size={experts}", *more
    return tuple(f"{FSDP}.{each}" for each in sizes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    mixture_model("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


class Found(NamedTuple):
    gradients: list[Tensor]  # by two replicas, by one copy, by ranks that share rows
    saved: Tensor
    updated: Tensor  # after the save
    resumed: Tensor  # after the same update of what was saved


def on_mesh(where: RankInfo, model: str, folder: Path) -> Found:
    meshes = mesh(2), mesh(4), mesh(4, "ulysses_sequence_parallel_size=2")
    gradients = [gradient(where, model, "actor", "token-mean", 2, each)[0] for each in meshes]
    first = actor(where, model, mesh(2))
    update(first)
    first.save(folder)
    await_written([folder], timeout_s=60)
    saved = weights(first)
    update(first)
    second = actor(where, model, mesh(4))
    second.load(folder)
    resumed = actor(where, model, mesh(2))
    resumed.load(folder)
    update(resumed)
    assert (weights(second) == saved).all()
    return Found(gradients, saved, weights(first), weights(resumed))


def test_divided_experts_do_not_change_the_numbers(model: Path, tmp_path: Path) -> None:
    begin_writing(tmp_path)
    folder = tmp_path / "state"
    found = on_ranks(NUM_RANKS, on_mesh, str(model), folder)

    whole, _ = gradient(rank_info(), str(model), "actor", "token-mean", 1)
    loaded = actor(rank_info(), str(model))
    loaded.load(folder)
    for rank in found:
        for mine in rank.gradients:
            assert (whole - mine).norm() <= 1e-6 * whole.norm()
        assert (rank.saved == weights(loaded)).all()
        assert (rank.updated == rank.resumed).all()
        assert (rank.updated != rank.saved).any()
