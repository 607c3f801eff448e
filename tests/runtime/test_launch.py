"""The recorded state of a run that fails or is stopped while it is created, and limits of time."""

from __future__ import annotations

import os
import pkgutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlctl.errors import DeviceMemoryError, Terminated, TimeUp
from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.launch import train
from rlctl.runtime.planning.plan import Plan, make_plan
from rlctl.runtime.training.stopping import Stopping
from tests.e2e.conftest import small, write_shelf
from tests.settings import given


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shelf(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def plan(inputs: Path, tmp_path: Path) -> Plan:
    own = given(response=4, runs=f"{tmp_path}/runs", name="r", logger=[])
    return make_plan(compose("ppo_trainer", [*small(inputs), *own]), inline=True)


def test_failed_run_records_its_state_and_reports_its_end(tmp_path: Path, plan: Plan) -> None:
    def collect(*_: Any) -> None:
        raise DeviceMemoryError("no memory", key="critic.k", value=8, proposed=4)

    algorithm = SimpleNamespace(needs=plan.algorithm.needs, collect=collect)
    ends: list[tuple[str, str]] = []
    with pytest.raises(DeviceMemoryError, match=r"planned for the pool main: .* GiB, actor "):
        train(
            replace(plan, algorithm=cast(Any, algorithm)),
            on_end=lambda run, state, _: ends.append((run.record.name, state)),
        )
    [folder] = (tmp_path / "runs").glob("*/r")
    run = RunDir(folder)
    assert (run.record.state, run.record.exit_code) == ("failed", DeviceMemoryError.exit_code)
    assert run.record.failure == {"code": "E-OOM", "message": "no memory", "hint": None}
    assert ends == [("r", "failed")]
    assert '"proposed": 4' in (folder / "events.jsonl").read_text()


@pytest.mark.parametrize(
    "moment", ["rlctl.runs.run_dir.put_in_place", "rlctl.runtime.launch._load_trackers"]
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_stopped_while_it_is_created_is_recorded_as_stopped(
    tmp_path: Path,
    plan: Plan,
    moment: str,
    number: signal.Signals,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def terminate(*_: object) -> None:
        raise Terminated(number)

    real = pkgutil.resolve_name(moment)

    def interrupted(*arguments: Any) -> Any:
        result = real(*arguments)
        os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(moment, interrupted)
    before = signal.signal(signal.SIGTERM, terminate)
    ends: list[str] = []
    try:
        with pytest.raises((KeyboardInterrupt, Terminated)):
            train(plan, on_end=lambda _, state, __: ends.append(state))
    finally:
        signal.signal(signal.SIGTERM, before)
    [folder] = (tmp_path / "runs").glob("*/*")
    run = RunDir(folder)
    assert (run.record.state, run.record.exit_code, ends) == ("stopped", code, ["stopped"])


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
