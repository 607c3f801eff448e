"""Memory of a worker's GPU, tested on a machine without one."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers import process as process_module
from rlctl.runtime.workers.process import Process
from rlctl.runtime.workers.process_memory import PeakMemory

CPU = RankInfo(0, 1, "cpu", 1, 60.0, False, None)
GPU = replace(CPU, device="cuda")


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the compiler and the settings of the allocator as they are."""
    monkeypatch.setattr(process_module, "enable_compiler", lambda: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")


def test_segments_of_gpus_grow_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    Process(GPU)
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    Process(CPU)
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    Process(GPU)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


class Phases:
    """Worker whose phases take memory of a GPU, beside an engine that sleeps or wakes."""

    def __init__(self, _: RankInfo, cumem: SimpleNamespace) -> None:
        self.engine = SimpleNamespace(handle=(0, 40), is_asleep=True)
        cumem.CuMemAllocator = SimpleNamespace(
            instance=SimpleNamespace(pointer_to_data={0: self.engine})
        )
        self.peak = 500  # while the model is loaded

    def run(self, peak: int, asleep: bool = True) -> int:
        self.peak, self.engine.is_asleep = peak, asleep
        return process_module.PEAK.pop() if peak == 50 else 0


def test_peaks_are_those_of_phases_without_an_engine_that_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cumem = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", cumem)
    process = Process(GPU)
    process.build("actor", Phases, cumem)
    worker = process.workers["actor"]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(worker, "peak", 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: worker.peak)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process_module, "PEAK", PeakMemory())
    process.call("actor", "run", (70,), {})
    assert process.call("actor", "run", (50,), {}) == 30  # of a phase before, without the engine
    process.call("actor", "run", (60, False), {})  # the engine wakes up
    process.call("actor", "run", (64, True), {})  # and falls asleep
    assert process.call("actor", "run", (50,), {}) == 64
