from __future__ import annotations

import time

import pytest

from rlctl.runtime.clock import Clock


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
