"""Sweeps that somebody else made: their record starts nothing unasked."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.errors import ConfigError
from rlctl.runs.process import DriverProcess
from rlctl.sweeps.launch import resume
from rlctl.sweeps.record import SweepDir, SweepRecord


class Composed(Exception):
    """The recipe was read."""


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepDir:
    def compose(*_: object) -> None:
        raise Composed

    monkeypatch.setattr("rlctl.sweeps.launch.compose", compose)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    record = SweepRecord(
        name="s",
        project="p",
        verb="ppo",
        recipe="ppo",
        base="ppo_trainer",
        fixed=["reward.custom_reward_function.path=score.py"],
        axes=["data.seed=1,2"],
        settings={"seeds": 1, "mode": "max", "metric": None},
        config_sha256="0",
        total_steps=1,
        first_seed=1,
        command=[],
        cwd=str(tmp_path / "evil"),
        created="2026-01-01T00:00:00+00:00",
        process=replace(DriverProcess.current(), started=0.0),
    )
    return SweepDir.create(tmp_path / "runs", record)


def test_own_sweep_resumes_without_a_word(sweep: SweepDir, tmp_path: Path) -> None:
    sweep.finish("stopped", 0)
    for _ in range(2):
        with pytest.raises(Composed):
            resume(sweep, lambda *_: None)
    sweep.path.parents[1].rename(tmp_path / "moved")
    with pytest.raises(Composed):
        resume(SweepDir(tmp_path / "moved" / "p" / "s"), lambda *_: None)


def test_copied_or_edited_sweep_needs_a_word(
    sweep: SweepDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.finish("stopped", 0)
    copy = SweepDir(shutil.copytree(sweep.path, tmp_path / "copied" / "p" / "s"))
    with pytest.raises(ConfigError, match="the sweep 's' was not made by you"):
        resume(copy, lambda *_: None)
    sweep.update(recipe=f"{tmp_path}/other.yaml")
    with pytest.raises(ConfigError, match="the sweep 's' was not made by you"):
        resume(sweep, lambda *_: None)
    monkeypatch.setenv("RLCTL_TRUSTED", str(tmp_path / "copied"))
    with pytest.raises(Composed):
        resume(copy, lambda *_: None)
