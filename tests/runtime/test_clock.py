"""Phase timing, and roles that time their calls."""

from __future__ import annotations

import time

import pytest
import torch

from rlctl.runtime.agents.delegating import DelegatingActor
from rlctl.runtime.batch import Prompts, Ragged, Rollouts, Scores
from rlctl.runtime.roles import Actor, Reward, Roles
from rlctl.runtime.training.clock import Clock
from rlctl.runtime.training.timed_roles import timed_roles
from tests.generation import echoed


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let no time pass but that of sleeps; return their seconds."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    monkeypatch.setattr(time, "perf_counter", lambda: sum(seconds))
    return seconds


def test_phases_exclude_nested_phases_and_add_up(slept: list[float]) -> None:
    phases: list[str] = []
    clock = Clock(phases.append)
    with clock.phase("outer"):
        time.sleep(0.02)
        with clock.phase("inner"):
            time.sleep(0.05)
        with clock.phase("inner"):
            time.sleep(0.01)
    seconds = clock.take()
    assert phases == ["outer", "inner", "inner"]
    assert seconds == pytest.approx({"inner": 0.06, "outer": 0.02})
    assert sum(seconds.values()) == pytest.approx(sum(slept))
    assert clock.take() == {}


class SlowActor(DelegatingActor):
    """Takes 30 ms for a weight sync and 10 ms for generation."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool, bool]] = []

    def update_weights(self) -> None:
        time.sleep(0.03)

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        self.calls.append((seed, validate, greedy))
        time.sleep(0.01)
        return echoed(prompts)


class NoReward(Reward):
    def compute_scores(self, rollouts: Rollouts, validate: bool = False) -> Scores:
        raise NotImplementedError


def test_weight_sync_and_generation_are_separate_phases() -> None:
    phases: list[str] = []
    clock = Clock(phases.append)
    slow = SlowActor()
    actor: Actor = timed_roles(Roles(slow, NoReward()), clock).actor
    prompts = Prompts(Ragged.from_rows([[1, 2], [3]], torch.int64), torch.arange(2), [])
    actor.update_weights()
    rollouts = actor.generate_sequences(prompts, seed=5, greedy=True)
    assert slow.calls == [(5, False, True)]
    assert rollouts.response_ids.values.tolist() == [1, 2, 3]
    assert phases == ["update_weights", "gen"]
    assert clock.take() == pytest.approx({"update_weights": 0.03, "gen": 0.01})
