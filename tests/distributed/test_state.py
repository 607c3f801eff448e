"""What a worker saves, another takes up: on the same number of ranks bit for bit, on another number the same weights and moments."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.model.sharding import full_parameters
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.workers.actor import ActorSpec, ActorWorker
from rlctl.runtime.workers.background import await_written
from rlctl.runtime.workers.dispatch import split
from tests.distributed.ranks import on_ranks, rank_info
from tests.distributed.test_gradient import LOSS, experience
from tests.models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


def actor(where: RankInfo, model: str) -> ActorWorker:
    config = compose("ppo", [f"actor_rollout_ref.model.path={model}", *LOSS]).config
    rollout = config.actor_rollout_ref
    algorithm = PPO.from_config(config, num_steps=1)
    return ActorWorker(
        where,
        ActorSpec(
            rollout.model, rollout.actor, SamplingConfig(rollout.rollout, 8, (2,)), 8, algorithm, 0
        ),
    )


def update(worker: ActorWorker) -> None:
    batch = experience()
    worker.update(
        batch.chunk(split(batch, worker.rank_info.world_size, balanced=True))[
            worker.rank_info.rank
        ],
        lr=1e-3,
    )


def weights(worker: ActorWorker) -> torch.Tensor:
    return torch.cat([value.flatten().clone() for _, value in full_parameters(worker.policy)])


def load_and_go_on(where: RankInfo, model: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights as loaded, and after one more update, which needs the optimizer's moments to be right too."""
    worker = actor(where, model)
    worker.load(folder)
    loaded = weights(worker)
    update(worker)
    return loaded, weights(worker)


def test_one_rank_goes_on_bit_for_bit_and_two_ranks_nearly_so(model: Path, tmp_path: Path) -> None:
    first = actor(rank_info(), str(model))
    untrained = weights(first)
    update(first)
    first.save(tmp_path / "state")
    saved = weights(first)
    update(first)  # while the thread writes: what is written is the copy
    await_written([tmp_path / "state"], timeout_s=60)
    assert not torch.equal(untrained, saved)
    loaded, went_on = load_and_go_on(rank_info(), str(model), tmp_path / "state")
    assert torch.equal(loaded, saved)
    assert torch.equal(went_on, weights(first))
    for loaded, went_on in on_ranks(2, load_and_go_on, str(model), tmp_path / "state"):
        assert torch.equal(loaded, saved)
        assert (went_on - weights(first)).norm() <= 1e-5 * weights(first).norm()


def save(where: RankInfo, model: str, from_folder: Path | None, folder: Path) -> torch.Tensor:
    """Take up a state, learn, save: what the next number of ranks takes up."""
    worker = actor(where, model)
    if from_folder is not None:
        worker.load(from_folder)
    update(worker)
    worker.save(folder)
    await_written([folder], timeout_s=60)
    return weights(worker)


def test_from_one_rank_to_two_and_back(model: Path, tmp_path: Path) -> None:
    """1 → 2 → 1 gives the weights of three updates on one rank, up to rounding."""
    straight = actor(rank_info(), str(model))
    for _ in range(3):
        update(straight)
    (one,) = on_ranks(1, save, str(model), None, tmp_path / "one")
    on_ranks(2, save, str(model), tmp_path / "one", tmp_path / "two")
    (three,) = on_ranks(1, save, str(model), tmp_path / "two", tmp_path / "three")
    assert not torch.equal(one, three)
    assert (three - weights(straight)).norm() <= 1e-5 * three.norm()


def test_saving_before_the_first_update_changes_nothing(model: Path, tmp_path: Path) -> None:
    """An optimizer that has not stepped has no state: torch would step it once to get some, and its bias correction would be another."""
    plain, saved = actor(rank_info(), str(model)), actor(rank_info(), str(model))
    saved.save(tmp_path / "state")
    await_written([tmp_path / "state"], timeout_s=60)
    loaded = actor(rank_info(), str(model))
    loaded.load(tmp_path / "state")
    for worker in (plain, saved, loaded):
        update(worker)
    assert torch.equal(weights(plain), weights(saved))
    assert torch.equal(weights(plain), weights(loaded))


def test_random_state_comes_back(model: Path, tmp_path: Path) -> None:
    worker = actor(rank_info(), str(model))
    worker.save(tmp_path / "state")
    drawn = random.random(), float(np.random.random()), float(torch.rand(()))
    await_written([tmp_path / "state"], timeout_s=60)
    actor(rank_info(), str(model)).load(tmp_path / "state")
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == drawn
