"""Use of machines: samples, their mean between steps, and what reaches the trackers."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlctl.recipes.compose import compose
from rlctl.runtime.cluster.system import Sampler, sample_gpus, sample_machine
from rlctl.runtime.launch import _begin_trackers
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.jsonl import METRICS_FILE, JsonlTracker, read_metrics
from tests.tracking.test_fanout import Events, Notebook, info, trackers_of


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def test_a_sample_of_this_machine_has_plausible_numbers_only() -> None:
    sample = sample_machine()
    assert {"cpu_percent", "memory_gib", "memory_percent"} <= set(sample)
    assert all(type(value) is float and math.isfinite(value) for value in sample.values())
    assert 0 <= sample["memory_percent"] <= 100
    assert sample["memory_gib"] > 0


@pytest.mark.parametrize("fails", [False, True])
def test_gpus_are_sampled_as_far_as_nvml_answers(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "0, 37, 1024, 81559, 120.50, 41\\n1, [N/A], 2048, 81559, [Unknown Error], 39\\n"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{'exit 9' if fails else ''}\nprintf '{rows}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = sample_gpus()
    if fails:
        assert found == {}
        return
    assert found["gpu0/utilization_percent"] == 37
    assert found["gpu0/memory_gib"] == 1
    assert (found["gpu0/power_w"], found["gpu0/temperature_c"]) == (120.5, 41)
    second = {name: value for name, value in found.items() if name.startswith("gpu1/")}
    total = 81559 / 1024
    assert second == {
        "gpu1/memory_gib": 2,
        "gpu1/memory_total_gib": total,
        "gpu1/temperature_c": 39,
    }


def test_a_step_gets_the_mean_since_the_last_one_and_a_lost_machine_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("rlctl"), "propagate", True)
    values = iter([1.0, 2.0, 6.0])
    done = threading.Event()

    def counting() -> dict[str, float]:
        value = next(values, None)
        if value is None:
            done.set()
            return {}
        return {"x": value}

    def lost() -> dict[str, float]:
        raise ConnectionError("the node is gone")

    with Sampler(0.001, [counting, lost]) as sampler:
        assert done.wait(60)
        assert sampler.read() == {"system/node0/x": 3.0}
        assert sampler.read() == {}
    [warning] = caplog.records
    assert warning.getMessage() == "no system metrics of node1: the node is gone"


def test_reading_does_not_wait_for_a_machine_that_does_not_answer() -> None:
    asked, released = threading.Event(), threading.Event()

    def slow() -> dict[str, float]:
        asked.set()
        released.wait(60)
        return {}

    with Sampler(0.001, [lambda: {"x": 1.0}, slow]) as sampler:
        assert asked.wait(60)
        assert sampler.read() == {"system/node0/x": 1.0}  # while `slow` does not answer
    released.set()


def test_trackers_get_the_use_with_a_step_and_the_record_does_not(tmp_path: Path) -> None:
    notebook, events = Notebook(), Events()
    trackers = trackers_of({"jsonl": JsonlTracker(), "notebook": notebook}, events)
    trackers.start(info(tmp_path))
    config = compose("ppo", ["trainer.tracking.system_s=0.001"]).config
    plan = cast(Any, SimpleNamespace(inline=True, config=config))
    with ExitStack() as stack:
        _begin_trackers(trackers, plan, cast(Any, None), stack)
        system = cast(Callable[[], Mapping[str, float]], trackers.system)
        seen: dict[str, float] = {}
        wait_for(lambda: bool(seen.update(system()) or seen))
        wait_for(lambda: bool(cast(Any, system).__self__._sums))
        trackers.log(1, {"a": 1.0})
    trackers.finish("finished")
    [logged] = [call[2] for call in notebook.calls if call[0] == "log"]
    assert logged["a"] == 1.0
    assert {"system/node0/cpu_percent", "system/node0/memory_gib"} <= set(logged)
    assert read_metrics(tmp_path / METRICS_FILE) == [{"step": 1, "a": 1.0}]
    assert ("system_nodes", {"nodes": ["controller"]}) in events.seen


def test_nothing_is_sampled_for_a_run_without_trackers() -> None:
    assert Trackers({}, Events(), cast(Any, None)).system is None
