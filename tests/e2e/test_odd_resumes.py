"""Resumes by two processes at once, and after a change of the clock, equal an undisturbed run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.command import rlctl, start, train
from tests.e2e.killed_runs import differing
from tests.settings import given

pytestmark = pytest.mark.soak


@pytest.fixture
def runs(settings: list[str], tmp_path: Path) -> tuple[Path, Path]:
    """Return a run of two steps, and one that is stopped after its first."""
    own = [*settings, *given(save=1, validate=1), "trainer.rollout_data_dir=elsewhere"]
    straight = train("grpo", "straight", "--inline", *own, cwd=tmp_path)
    short = train("grpo", "short", "--inline", *own, "trainer.total_training_steps=1", cwd=tmp_path)
    return straight, short


TWO = ("resume", "short", "--inline", "trainer.total_training_steps=2")


def test_one_of_two_drivers_resumes(runs: tuple[Path, Path], tmp_path: Path) -> None:
    straight, short = runs
    drivers = [start(*TWO, cwd=tmp_path) for _ in range(2)]
    ends = [driver.communicate() for driver in drivers]
    codes = [driver.returncode for driver in drivers]
    assert sorted(codes) in ([0, 0], [0, 5]), ends  # the second may find a finished run
    assert differing(short, straight) == []


@pytest.mark.parametrize("days", [-3, 400])
def test_a_changed_clock_changes_nothing(
    days: int, runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, short = runs
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + days * 86400)
    rlctl(*TWO, cwd=tmp_path)
    assert differing(short, straight) == []
