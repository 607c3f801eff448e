"""Sweeps that somebody else made: their record starts nothing unasked."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.errors import ConfigError
from rlctl.process import DriverProcess
from rlctl.sweeps.results import export
from rlctl.sweeps.sweep_launch import resume
from rlctl.sweeps.sweep_record import SweepDir, SweepRecord


class Composed(Exception):
    """The recipe was read."""


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepDir:
    def compose(*_: object) -> None:
        raise Composed

    monkeypatch.setattr("rlctl.sweeps.sweep_launch.compose", compose)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed process is a fork")
def test_a_killed_start_leaves_its_name_free_or_a_sweep_to_resume(
    sweep: SweepDir, tmp_path: Path
) -> None:
    """Kill a process at each folder that it makes, and each file that it opens or renames."""

    def create_until(number: int, root: Path) -> int:
        """Return the exit status of a process that ends at an event, 0 if it ends before."""
        if process := os.fork():
            return os.waitpid(process, 0)[1]
        events = itertools.count(1)

        def audit(event: str, _: tuple[object, ...]) -> None:
            if event in ("os.mkdir", "os.rename", "open") and next(events) == number:
                os._exit(1)

        with suppress(BaseException):
            sys.addaudithook(audit)
            SweepDir.create(root, sweep.record)
            os._exit(0)
        os._exit(2)

    for number in itertools.count(1):
        root = tmp_path / f"killed-{number}"
        ended, path = create_until(number, root), root / "p" / "s"
        assert os.waitstatus_to_exitcode(ended) in (0, 1)
        if path.exists():
            with pytest.raises(Composed):
                resume(SweepDir(path), lambda *_: None)
        else:
            assert SweepDir.create(root, sweep.record).path == path
        if ended == 0:
            break
    assert number > 8


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
    trial: Any = SimpleNamespace(number=0, overrides=[], value=None)
    with pytest.raises(ConfigError, match="the sweep 's' was not made by you"):
        export(copy, trial, tmp_path / "best.yaml")
    sweep.update(recipe=f"{tmp_path}/other.yaml")
    with pytest.raises(ConfigError, match="the sweep 's' was not made by you"):
        resume(sweep, lambda *_: None)
    monkeypatch.setenv("RLCTL_TRUSTED", str(tmp_path / "copied"))
    with pytest.raises(Composed):
        resume(copy, lambda *_: None)
