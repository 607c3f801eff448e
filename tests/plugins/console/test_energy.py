"""Counters of energy, with a folder and a library in place of the hardware."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlctl.api import compose
from rlctl.plugins.console import energy
from rlctl.runs.run import read_run
from rlctl.runs.run_dir import RunDir

CONFIG = compose("ppo", ["trainer.energy=true"]).config


def write_zone(folder: Path, zone: str, name: str, joules: float) -> Path:
    place = folder / zone
    place.mkdir(parents=True, exist_ok=True)
    (place / "name").write_text(f"{name}\n")
    (place / "max_energy_range_uj").write_text("1000000000\n")
    (place / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    return place


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run on a machine with one processor and one GPU."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "powercap")
    write_zone(tmp_path / "powercap", "intel-rapl:0", "package-0", 900)
    write_zone(tmp_path / "powercap", "intel-rapl:0:0", "core", 800)
    write_zone(tmp_path / "powercap", "intel-rapl:1", "psys", 800)
    joules = {"GPU-1": 5000.0}

    def read(handle: str) -> float:
        return 1e3 * joules[handle]

    nvml = SimpleNamespace(
        joules=joules,
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: ["GPU-0", "GPU-1"][index],
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetTotalEnergyConsumption=read,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr(energy, "find_spec", lambda _: nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    return RunDir.create(tmp_path / "runs", "p", "r", "ppo")


def test_energy_is_that_of_all_attempts_also_after_a_turn_of_the_counter(
    run: RunDir, tmp_path: Path
):
    listener = energy.Energy(run, CONFIG)
    write_zone(tmp_path / "powercap", "intel-rapl:0", "package-0", 100)  # 1000 J are a turn
    sys.modules["pynvml"].joules["GPU-1"] += 40
    listener.close()
    joules = json.loads((run.path / energy.FILE).read_text())
    assert joules == {"rapl/intel-rapl:0": pytest.approx(200), "nvml/1": pytest.approx(40)}
    again = energy.Energy(run, CONFIG)
    sys.modules["pynvml"].joules["GPU-1"] += 3_600_000 - 240
    again.close()
    assert energy.energy_kwh(read_run(run.path)) == 1.0


def test_a_machine_without_counters_is_a_warning(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    monkeypatch.setattr(energy, "find_spec", lambda _: None)
    energy.Energy(run, CONFIG).close()
    assert "no counter of energy" in caplog.text
    assert energy.energy_kwh(read_run(run.path)) is None


def test_gpus_without_the_library_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, run: RunDir
):
    monkeypatch.setattr(energy, "find_spec", lambda _: None)
    monkeypatch.setattr(energy, "DRIVER", run.path)
    assert list(energy.gpus()) == []
    assert "pip install 'rlctl[energy]'" in caplog.text
