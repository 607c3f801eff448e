"""Building of roles, with pools that record what is spawned."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import create_autospec

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.agents.actor import ColocatedEngines, RankEngines
from rlctl.runtime.agents.schedule import TurnEngines
from rlctl.runtime.agents.stream import OverlappedActor
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.algorithms.references import ActorAsReference
from rlctl.runtime.build import build_roles
from rlctl.runtime.cluster.disaggregated import DisaggregatedActor
from rlctl.runtime.cluster.pools import Pools
from rlctl.runtime.data.tokenizer import load_tokenizer
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.roles import Actor, Roles
from rlctl.runtime.rollout.requests import Decoding, Request
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.training import generation
from rlctl.runtime.training.generation import Generation, _overlapped, with_episodes
from rlctl.runtime.workers.rollout import RolloutWorker
from tests.models import write_tiny_model


class Worker:
    """Stand-in for any worker; its engine starts in two phases."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.phases = iter(["loading the engine", None])

    def continue_startup(self) -> str | None:
        return next(self.phases)

    def __getattr__(self, method: str) -> Any:
        return lambda *_: None


class RecordingPool:
    """Stand-in for a pool: records the roles spawned in it, in order."""

    def __init__(self, name: str, spawned: list[tuple[str, str, str]]) -> None:
        self.name = name
        self.spawned = spawned
        self.nodes: list[str] = []

    def spawn(self, role: str, worker: type, /, *_specs: Any) -> Any:
        self.spawned.append((self.name, role, worker.__name__))
        return Worker(role)

    def close(self) -> None: ...


class RecordingEngines(RecordingPool):
    """Stand-in for the pool of rollout engines."""

    def spawn(self, *_specs: Any) -> Any:
        """Record the engines in order."""
        return super().spawn("rollout", RolloutWorker)


Built = tuple[Roles, list[tuple[str, str, str]], list[str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def built(model: Path, needs: Needs, *overrides: str) -> Built:
    files = ["data.train_files=[t.parquet]", f"actor_rollout_ref.model.path={model}"]
    config = compose("ppo_trainer", [*files, *overrides]).config
    spawned: list[tuple[str, str, str]] = []
    phases: list[str] = []
    workers = {name: RecordingPool(name, spawned) for name in ("main", "values")}
    separate = config.trainer.placement.rollout is not None
    engines = RecordingEngines("engines", spawned) if separate else None
    pools = Pools(cast(Any, workers), cast(Any, engines))
    algorithm = cast(Any, SimpleNamespace(needs=needs))
    tokenizer = load_tokenizer(str(model), False)
    roles = build_roles(config, algorithm, tokenizer, pools, cast(Any, None), phases.append)
    return roles, spawned, phases


def test_engine_in_the_actor_reports_its_startup_phases(model: Path) -> None:
    _, spawned, phases = built(model, Needs.ENGINE)
    assert [role for _, role, _ in spawned] == ["actor"]
    assert phases[0] == "building the actor"
    assert phases[1].startswith("starting the rollout engine (")
    assert phases[2:] == ["loading the engine"]


def test_each_role_is_spawned_in_its_pool(model: Path) -> None:
    needs = Needs.REFERENCE | Needs.CRITIC
    roles, spawned, _ = built(model, needs, "trainer.placement.critic=values")
    assert spawned == [
        ("main", "actor", "ActorWorker"),
        ("main", "reference", "ReferenceWorker"),
        ("values", "critic", "CriticWorker"),
    ]
    assert {role.name for role in roles.models()} == {"actor", "reference", "critic"}
    assert [role.name for role in roles.learning()] == ["actor", "critic"]


def test_adapters_replace_the_reference_model(model: Path) -> None:
    roles, spawned, _ = built(model, Needs.REFERENCE, "actor_rollout_ref.model.lora_rank=4")
    assert [role for _, role, _ in spawned] == ["actor"]
    assert isinstance(roles.reference, ActorAsReference)


def test_engines_in_their_own_pool_start_before_the_other_roles(model: Path) -> None:
    placed = "trainer.placement.rollout=engines"
    roles, spawned, phases = built(model, Needs.ENGINE | Needs.CRITIC, placed)
    assert spawned == [
        ("engines", "rollout", "RolloutWorker"),
        ("main", "actor", "ActorWorker"),
        ("main", "critic", "CriticWorker"),
    ]
    assert isinstance(roles.actor, DisaggregatedActor)
    assert phases[-1] == "building the rollout engines"


def overlapped(engines: TurnEngines, *overrides: str) -> Actor:
    """Return the actor of a run whose rewards are computed in processes."""
    config = compose("grpo", list(overrides)).config
    rollout = config.actor_rollout_ref.rollout
    actor, reward = create_autospec(Actor), create_autospec(RuleReward)
    sampling = SamplingConfig(rollout, 8, (2,))
    roles = _overlapped(config, Roles(actor, reward), engines, 4, sampling, reward)
    return roles.actor


def test_overlap_places_requests_on_engines(caplog: pytest.LogCaptureFixture) -> None:
    """One engine of two ranks each, a pool of three, and a pool whose engines return groups."""
    decoding = Decoding(1.0, 1.0, -1, ())
    ids = [Request(i, torch.tensor([1]), decoding, (4,), (i,)) for i in range(12)]
    shared = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    pool = create_autospec(DisaggregatedActor, instance=True)
    pool.num_engines.return_value = 3
    for engines, overrides, expected in (
        (ColocatedEngines(create_autospec(RankEngines), 4, 2), [shared], {0: 6, 1: 6}),
        (pool, [], {0: 4, 1: 4, 2: 4}),
    ):
        actor = overlapped(engines, *overrides)
        assert isinstance(actor, OverlappedActor)
        assert Counter(each.affinity for each in actor._placed(ids)) == expected
    caplog.set_level("INFO", "rlctl")
    actor = overlapped(pool, "actor_rollout_ref.rollout.mode=async")
    assert not isinstance(actor, OverlappedActor)
    assert "responses are scored after generation, although reward.overlap is true" in caplog.text


def test_programs_are_scored_after_generation_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    actor = create_autospec(DisaggregatedActor, instance=True)
    reward = create_autospec(RuleReward, instance=True)
    reward.pool = SimpleNamespace(has_workers=True)
    passed: list[object] = []

    def agent_actor(*args: object) -> object:
        passed.append(args[-1])
        return actor

    monkeypatch.setattr(
        generation, "episode_settings", create_autospec(generation.episode_settings)
    )
    monkeypatch.setattr(generation, "AgentActor", agent_actor)
    monkeypatch.setattr(generation.SamplingConfig, "from_config", lambda *_: None)
    caplog.set_level("INFO", "rlctl")
    for program, expected in (("null", reward), ("module:play", None)):
        config = compose(
            "tools",
            [
                f"actor_rollout_ref.rollout.agent.program={program}",
                "reward.custom_reward_function.path=score.py",
            ],
        ).config
        setup = Generation(config, cast(Any, None), 1, cast(Any, SimpleNamespace()))
        with with_episodes(replace(setup, reward=reward), Roles(actor, reward)):
            assert passed.pop() is expected
        assert ("an episode of an agent program" in caplog.text) is (expected is None)
