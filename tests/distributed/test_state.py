"""Saved worker state loads bitwise on the same number of ranks, and up to rounding on another."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.model.sharding import full_tensor
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.workers.actor import ActorSpec, ActorWorker
from rlctl.runtime.workers.background import await_written, begin_writing
from rlctl.runtime.workers.dispatch import split
from tests.configs import configured
from tests.distributed.ranks import on_ranks, rank_info
from tests.distributed.test_gradient import LOSS, experience
from tests.models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


def actor(where: RankInfo, model: str, overrides: tuple[str, ...] = ()) -> ActorWorker:
    config = configured("ppo", [f"actor_rollout_ref.model.path={model}", *LOSS], overrides)
    rollout = config.actor_rollout_ref
    algorithm = PPO.from_config(config, num_steps=1)
    return ActorWorker(
        where,
        ActorSpec(
            rollout.model, rollout.actor, SamplingConfig(rollout.rollout, 8, (2,)), 8, algorithm, 0
        ),
    )


def update(worker: ActorWorker) -> None:
    batch, where = experience(), worker.rank_info
    ranks_per_row = worker.learner.model.ranks_per_row
    parts = split(batch, where.world_size // ranks_per_row, balanced=True)
    worker.update(batch.chunk(parts)[where.rank // ranks_per_row], lr=1e-3)


def weights(worker: ActorWorker) -> torch.Tensor:
    return torch.cat([full_tensor(value).flatten().clone() for value in worker.policy.parameters()])


def load_and_update(where: RankInfo, model: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loaded weights, and those after one update, which depends on the moments."""
    worker = actor(where, model)
    worker.load(folder)
    loaded = weights(worker)
    update(worker)
    return loaded, weights(worker)


def test_load_is_bitwise_on_one_rank_and_close_on_two(model: Path, tmp_path: Path) -> None:
    first = actor(rank_info(), str(model))
    untrained = weights(first)
    update(first)
    begin_writing(tmp_path)
    first.save(tmp_path / "state")
    saved = weights(first)
    update(first)  # while the thread writes its copy of the state
    await_written([tmp_path / "state"], timeout_s=60)
    assert not torch.equal(untrained, saved)
    loaded, updated = load_and_update(rank_info(), str(model), tmp_path / "state")
    assert torch.equal(loaded, saved)
    assert torch.equal(updated, weights(first))
    for loaded, updated in on_ranks(2, load_and_update, str(model), tmp_path / "state"):
        assert torch.equal(loaded, saved)
        assert (updated - weights(first)).norm() <= 1e-5 * weights(first).norm()


def save(where: RankInfo, model: str, from_folder: Path | None, folder: Path) -> torch.Tensor:
    """Load a state, update, save, and return the weights."""
    worker = actor(where, model)
    if from_folder is not None:
        worker.load(from_folder)
    update(worker)
    worker.save(folder)
    await_written([folder], timeout_s=60)
    return weights(worker)


def test_state_moves_from_one_rank_to_two_and_back(model: Path, tmp_path: Path) -> None:
    """1 → 2 → 1 gives the weights of three updates on one rank, up to rounding."""
    begin_writing(tmp_path)
    straight = actor(rank_info(), str(model))
    for _ in range(3):
        update(straight)
    (one,) = on_ranks(1, save, str(model), None, tmp_path / "one")
    on_ranks(2, save, str(model), tmp_path / "one", tmp_path / "two")
    (three,) = on_ranks(1, save, str(model), tmp_path / "two", tmp_path / "three")
    assert not torch.equal(one, three)
    assert (three - weights(straight)).norm() <= 1e-5 * three.norm()


def test_saving_before_the_first_update_changes_nothing(model: Path, tmp_path: Path) -> None:
    """Saving must not step a fresh optimizer to create its state, as torch's helper does."""
    plain, saved = actor(rank_info(), str(model)), actor(rank_info(), str(model))
    begin_writing(tmp_path)
    saved.save(tmp_path / "state")
    await_written([tmp_path / "state"], timeout_s=60)
    loaded = actor(rank_info(), str(model))
    loaded.load(tmp_path / "state")
    for worker in (plain, saved, loaded):
        update(worker)
    assert torch.equal(weights(plain), weights(saved))
    assert torch.equal(weights(plain), weights(loaded))


def test_random_state_is_restored(model: Path, tmp_path: Path) -> None:
    worker = actor(rank_info(), str(model))
    begin_writing(tmp_path)
    worker.save(tmp_path / "state")
    drawn = random.random(), float(np.random.random()), float(torch.rand(()))
    await_written([tmp_path / "state"], timeout_s=60)
    actor(rank_info(), str(model)).load(tmp_path / "state")
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == drawn
