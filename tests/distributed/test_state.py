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


def save(worker: ActorWorker, folder: Path) -> None:
    worker.save(folder)
    await_written([folder], timeout_s=60)


def load_update_and_save(where: RankInfo, model: str, folder: Path) -> list[torch.Tensor]:
    """Return the loaded weights, and those after an update, which depends on the moments."""
    worker = actor(where, model)
    worker.load(folder / "one")
    found = [weights(worker)]
    update(worker)
    save(worker, folder / f"on-{where.world_size}")
    return [*found, weights(worker)]


def test_state_moves_from_one_rank_to_two_and_back(model: Path, tmp_path: Path) -> None:
    """Loading is bitwise on one rank; updates on two are those on one up to rounding."""
    first = actor(rank_info(), str(model))
    untrained = weights(first)
    update(first)
    begin_writing(tmp_path)
    first.save(tmp_path / "one")
    saved = weights(first)
    update(first)  # while the thread writes its copy of the state
    await_written([tmp_path / "one"], timeout_s=60)
    expected = weights(first)
    assert not torch.equal(untrained, saved)
    loaded, updated = load_update_and_save(rank_info(), str(model), tmp_path)
    assert torch.equal(loaded, saved)
    assert torch.equal(updated, expected)
    for loaded, updated in on_ranks(2, load_update_and_save, str(model), tmp_path):
        assert torch.equal(loaded, saved)
        assert (updated - expected).norm() <= 1e-5 * expected.norm()
    back = actor(rank_info(), str(model))
    back.load(tmp_path / "on-2")
    for worker in (first, back):
        update(worker)
    assert not torch.equal(weights(back), updated)
    assert (weights(back) - weights(first)).norm() <= 1e-5 * weights(first).norm()


def test_saving_before_the_first_update_changes_nothing(model: Path, tmp_path: Path) -> None:
    """Saving must not step a fresh optimizer to create its state, as torch's helper does."""
    plain, saved = actor(rank_info(), str(model)), actor(rank_info(), str(model))
    begin_writing(tmp_path)
    save(saved, tmp_path / "state")
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
