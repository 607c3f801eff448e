"""What a worker saves, another takes up: on the same number of ranks bit for bit, on another number the same weights and moments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.model.sharding import full_parameters
from rlctl.runtime.place import Place
from rlctl.runtime.workers.actor import ActorSpec, ActorWorker
from rlctl.runtime.workers.dispatch import split
from tests.distributed.ranks import on_ranks, place
from tests.distributed.test_gradient import LOSS, experience
from tests.models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


def actor(where: Place, model: str) -> ActorWorker:
    config = compose("ppo", [f"actor_rollout_ref.model.path={model}", *LOSS]).config
    rollout = config.actor_rollout_ref
    return ActorWorker(where, ActorSpec(rollout.model, rollout.actor, rollout.rollout, 8, 8, (2,), PPO.from_config(config, num_steps=1), 0))


def update(worker: ActorWorker) -> None:
    batch = experience()
    worker.update(batch.chunk(split(batch, worker.place.world_size, balanced=True))[worker.place.rank], lr=1e-3)


def weights(worker: ActorWorker) -> torch.Tensor:
    return torch.cat([value.flatten().clone() for _, value in full_parameters(worker.policy)])


def load_and_go_on(where: Place, model: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights as loaded, and after one more update, which needs the optimizer's moments to be right too."""
    worker = actor(where, model)
    worker.load(folder)
    loaded = weights(worker)
    update(worker)
    return loaded, weights(worker)


def test_one_rank_goes_on_bit_for_bit_and_two_ranks_nearly_so(model: Path, tmp_path: Path) -> None:
    first = actor(place(), str(model))
    untrained = weights(first)
    update(first)
    first.save(tmp_path / "state")
    saved = weights(first)
    update(first)
    assert not torch.equal(untrained, saved)
    loaded, went_on = load_and_go_on(place(), str(model), tmp_path / "state")
    assert torch.equal(loaded, saved)
    assert torch.equal(went_on, weights(first))
    for loaded, went_on in on_ranks(2, load_and_go_on, str(model), tmp_path / "state"):
        assert torch.equal(loaded, saved)
        assert (went_on - weights(first)).norm() <= 1e-5 * weights(first).norm()
