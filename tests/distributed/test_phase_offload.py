"""Offloaded parameters leave the device between phases, and no number changes.

The device is a CPU whose memory counts as that of another device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.runtime.base.batch import LogProbs, Prompts, Ragged
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model import phase_offload
from rlctl.runtime.model.phase_offload import PhaseOffload
from rlctl.runtime.model.sharding import local_part
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.background import begin_writing
from rlctl.runtime.workers.critic import CriticWorker
from tests.configs import configured
from tests.distributed.ranks import on_ranks, rank_info
from tests.workers import LOSS, actor_of, critic_of, experience

FSDP = ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp_config")
# Weights that are mapped from files cannot leave a CPU.
RANDOM = [f"{section}.model.init=random" for section in ("actor_rollout_ref", "critic")]
OFFLOAD = [f"{section}.param_offload=true" for section in FSDP]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let offloaded parameters leave a CPU."""
    monkeypatch.setattr(phase_offload, "_HOST", ())


def resident(worker: ActorWorker | CriticWorker) -> bool:
    """Return True if a worker's parameters have memory."""
    parameters = worker.learner.model.parameters()
    sizes = {local_part(each.detach()).untyped_storage().nbytes() > 0 for each in parameters}
    assert len(sizes) == 1
    return sizes.pop()


def roles(where: RankInfo, model: Path | str, *given: str) -> tuple[ActorWorker, CriticWorker]:
    paths = [f"{section}.model.path={model}" for section in ("actor_rollout_ref", "critic")]
    config = configured("ppo", [*paths, *RANDOM, *LOSS], given)
    return actor_of(where, config), critic_of(where, config)


def steps(where: RankInfo, model: Path | str, folder: Path, *given: str) -> list[Any]:
    """Run two steps of both roles, save and load; return their numbers, and who was resident."""
    phase_offload._HOST = ()  # in another process, too
    actor, critic = roles(where, model, *given)
    actor.start_engine()
    prompts = Prompts(Ragged.from_rows([[3, 4, 5], [6, 7]], torch.int64), torch.arange(2), [])
    batch = experience().select(torch.arange(8).view(where.world_size, -1)[where.rank])
    found: list[Any] = []
    seen: list[tuple[bool, bool]] = []

    def note(result: Any) -> None:
        found.append(result.log_probs.values if isinstance(result, LogProbs) else result)
        seen.append((resident(actor), resident(critic)))

    for _ in range(2):
        note(actor.update_weights())
        note(actor.generate_sequences(prompts, seed=1).response_ids.values)
        note(actor.compute_log_probs(batch))
        note(critic.compute_values(batch).values)
        note(critic.update(batch, lr=1e-2))
        note(actor.update(batch, lr=1e-2))
    folder.mkdir(exist_ok=True)
    begin_writing(folder)
    actor.learner.save(folder / "actor")
    actor.learner.writer.wait()
    note(actor.learner.load(folder / "actor"))
    note(critic.compute_values(batch).values)
    note(actor.compute_log_probs(batch))
    return [found, seen]


def check_equal(plain: list[Any], offloaded: list[Any]) -> None:
    for expected, found in zip(plain[0], offloaded[0], strict=True):
        if isinstance(expected, Tensor):
            assert torch.equal(expected, found)
        else:
            assert str(expected) == str(found)


def test_one_model_is_on_the_device_at_a_time(model: Path, tmp_path: Path) -> None:
    """An engine that computes with the policy keeps it; the critic leaves all the same."""
    plain = steps(rank_info(), model, tmp_path / "plain")
    offloaded = steps(rank_info(), model, tmp_path / "offloaded", *OFFLOAD)
    check_equal(plain, offloaded)
    assert set(plain[1]) == {(True, True)}
    actors, critics = (True, False), (False, True)
    assert offloaded[1][:6] == [actors, actors, actors, critics, critics, actors]


@pytest.mark.soak
def test_shards_leave_the_device_during_generation(model: Path, tmp_path: Path) -> None:
    plain = on_ranks(2, steps, str(model), tmp_path / "plain")
    offloaded = on_ranks(2, steps, str(model), tmp_path / "offloaded", *OFFLOAD)
    nobody, actors, critics = (False, False), (True, False), (False, True)
    for expected, found in zip(plain, offloaded, strict=True):
        check_equal(expected, found)
        assert found[1][:6] == [nobody, nobody, actors, critics, critics, actors]


def test_frozen_parameters_are_copied_to_the_host_once() -> None:
    layer = torch.nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    offload, other = PhaseOffload(layer, True), torch.nn.Linear(1, 1)
    average = torch.ones(4)
    offload.add([average])
    PhaseOffload(other, False)  # another model is built
    offload.enter()
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, average):
            tensor.fill_(7)
    PhaseOffload.clear_device()
    assert [layer.weight.untyped_storage().nbytes(), average.untyped_storage().nbytes()] == [0, 0]
    offload.enter()
    assert (layer.weight == 7).all()
    assert (average == 7).all()
    assert not (layer.bias == 7).any()


def test_nothing_moves_on_a_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_offload, "_HOST", ("cpu",))
    actor, critic = roles(rank_info(), model, *OFFLOAD)
    PhaseOffload.clear_device()
    assert resident(actor)
    assert resident(critic)
