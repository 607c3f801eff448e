"""Limits of time while the clock of the system changes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlctl.errors import TimeUp
from rlctl.runtime.training.stopping import Stopping


@pytest.mark.parametrize("hours", [-2, 2])
def test_time_limit_does_not_follow_the_clock(
    hours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    end_by = time.monotonic() + 3600
    stopping = Stopping(60, logged.append, tmp_path / "stop", end_by)
    with stopping:
        stopping.check(0.0)
        jumped = time.time() + 3600 * hours
        monkeypatch.setattr(time, "time", lambda: jumped)
        stopping.check(0.0)
        assert not stopping.asked
        monkeypatch.setattr(time, "monotonic", lambda: end_by - 1.0)
        stopping.check(1.0)
        assert stopping.asked
    assert isinstance(stopping.error(), TimeUp)
    assert logged[0].startswith("1 s left, not enough for another step")
