"""Experts divided over ranks give the gradient and state of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.background import begin_writing
from tests.distributed.meshes import (
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
from tests.models import MIXTURES, mixture_model, tiny_tokenizer
from tests.workers import actor, experience, weights

# Other implementations do not compute in float64.
EAGER = "actor_rollout_ref.model.override_config.experts_implementation=eager"
# By two replicas, by ranks that share rows, by ranks that split layers, by both.
MESHES = (
    mesh(experts=2),
    mesh(experts=4, sequence=2),
    mesh(tensor=2),
    mesh(tensor=2, experts=2),
)
R2, R3 = (f"actor_rollout_ref.actor.router_replay.mode={mode}" for mode in ("R2", "R3"))
HALVES = torch.arange(8).chunk(2)  # of the rows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    for kind in MIXTURES:
        tokenizer.save_pretrained(folder / kind)
        mixture_model(kind, vocab_size=264).save_pretrained(folder / kind)
    return folder


class Found(NamedTuple):
    gradients: list[Tensor]  # by each mesh
    others: list[Tensor]  # of the other models, by ranks that split layers
    replayed: list[Tensor]  # of given experts, by ranks that do not split layers
    chosen: list[Tensor]  # experts of the tokens of the rows that two ranks share
    trained: Trained
    loaded: Tensor  # weights on another mesh


def actors_gradient(where: RankInfo, model: Path, num_micro_batches: int, *more: str) -> Tensor:
    settings = (*more, *PASSES, EAGER)
    return gradient(where, str(model), "actor", "token-mean", num_micro_batches, settings)[0]


def replay(where: RankInfo, model: Path, num_micro_batches: int, *more: str) -> Tensor:
    settings = (*more, *PASSES, EAGER, R3)
    return gradient(where, str(model), "replay", "token-mean", num_micro_batches, settings)[0]


def on_mesh(where: RankInfo, models: Path, folder: Path) -> Found:
    first, *others = (models / kind for kind in MIXTURES)
    with float64():
        gradients = [actors_gradient(where, first, 2, *each) for each in MESHES]
        of_others = [actors_gradient(where, each, 2, *mesh(tensor=2)) for each in others]
        replayed = [replay(where, first, 2, *each) for each in MESHES[1:3]]
    recording = actor(where, str(first), (*MESHES[2], R2))
    own = recording.compute_log_probs(experience().chunk(HALVES)[where.rank // 2]).routing
    chosen = [] if own is None else own.rows()
    trained = train(where, str(first), folder, mesh(experts=2))
    second = actor(where, str(first), mesh(tensor=2, experts=2))
    second.load(folder)
    return Found(gradients, of_others, replayed, chosen, trained, weights(second))


@pytest.mark.soak
def test_divided_experts_do_not_change_the_numbers(models: Path, tmp_path: Path) -> None:
    begin_writing(tmp_path)
    folder = tmp_path / "state"
    found = on_ranks(NUM_RANKS, on_mesh, models, folder)

    with float64():
        whole, *others = (actors_gradient(rank_info(), models / kind, 1) for kind in MIXTURES)
        replayed = replay(rank_info(), models / "qwen3_moe", 1)
    assert (whole - replayed).norm() > 0.1 * whole.norm()
    recording, batch = actor(rank_info(), str(models / "qwen3_moe"), (R2,)), experience()
    own = recording.compute_log_probs(batch).routing
    assert own is not None
    for number, rank in enumerate(found):
        for mine in rank.replayed:
            assert (replayed - mine).norm() <= 1e-6 * replayed.norm()
        for row, mine in zip(HALVES[number // 2].tolist(), rank.chosen, strict=True):
            assert torch.equal(own.rows()[row], mine)
    metrics = recording.update(replace(batch, routing=own), lr=1e-3)
    assert metrics["training/router_agreement"].value == 1
    check_trained([rank.trained for rank in found], str(models / "qwen3_moe"), folder)
    for rank in found:
        expected = [*[whole] * len(MESHES), *others]
        for mine, alone in zip([*rank.gradients, *rank.others], expected, strict=True):
            assert (alone - mine).norm() <= 1e-6 * alone.norm() > 0
        assert (rank.loaded == rank.trained.saved).all()
