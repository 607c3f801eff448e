from __future__ import annotations

import time
from typing import Any, cast

import pytest

from rlctl.runtime.roles import Actor, Reward, Roles
from rlctl.runtime.training.clock import Clock, timed_roles


def test_phases_exclude_the_phases_inside_them_and_add_up() -> None:
    told: list[str] = []
    clock = Clock(told.append)
    begin = time.perf_counter()
    with clock.phase("outer"):
        time.sleep(0.02)
        with clock.phase("inner"):
            time.sleep(0.05)
        with clock.phase("inner"):
            time.sleep(0.01)
    total = time.perf_counter() - begin
    seconds = clock.take()
    assert told == ["outer", "inner", "inner"]
    assert seconds["inner"] >= 0.06 > seconds["outer"] >= 0.02
    assert sum(seconds.values()) == pytest.approx(total, abs=2e-3)
    assert clock.take() == {}


def test_the_hand_over_of_weights_is_told_apart_from_generation() -> None:
    class Slow:
        def update_weights(self) -> None:
            time.sleep(0.03)

        def generate_sequences(self, seed: int) -> int:
            time.sleep(0.01)
            return seed

    told: list[str] = []
    clock = Clock(told.append)
    actor = cast(
        Any, timed_roles(Roles(actor=cast(Actor, Slow()), reward=cast(Reward, None)), clock).actor
    )
    assert actor.generate_sequences(seed=5) == 5
    assert told == ["update_weights", "gen"]
    seconds = clock.take()
    assert seconds["update_weights"] >= 0.03 > seconds["gen"] >= 0.01
