"""Phase timing, and calls that are phases."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from rlctl.runtime.workers.dispatch import Dispatch, Worker, dispatch
from rlctl.tracking.clock import Clock, timed


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


class SlowWorker(Worker):
    """Takes 30 ms for a weight sync and 10 ms for log-probs."""

    @dispatch(Dispatch.BROADCAST, phase="update_weights")
    def sync(self) -> None:
        time.sleep(0.03)

    @dispatch(Dispatch.BROADCAST, phase=lambda weights: "ref" if weights == "base" else "old")
    def score(self, weights: str) -> None:
        time.sleep(0.01)


@timed("gen")
def generate(worker: SlowWorker) -> None:
    time.sleep(0.02)
    worker.score("base")


def test_calls_of_workers_are_phases_of_the_running_clock() -> None:
    phases: list[str] = []
    clock, worker = Clock(phases.append), SlowWorker(cast(Any, None))
    worker.sync()  # no clock runs
    with clock.running():
        worker.sync()
        generate(worker)
        worker.score("current")
        thread = threading.Thread(target=worker.sync)  # beside the step: none of its time
        thread.start()
        thread.join()
    worker.sync()
    assert phases == ["update_weights", "gen", "ref", "old"]
    assert clock.take() == pytest.approx(
        {"update_weights": 0.03, "gen": 0.02, "ref": 0.01, "old": 0.01}
    )
