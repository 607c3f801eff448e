"""Breakpoints and time limits, stacks of running processes, and profiles of steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import rlctl
from rlctl import debugging
from rlctl.cli.views.run_page import print_run
from rlctl.errors import ConfigError, ConflictError, MissingExtraError, ResourceError
from rlctl.process import DriverProcess
from rlctl.recipes.compose import compose
from rlctl.runs import stacks
from rlctl.runs.details import details
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from rlctl.runtime.cluster.ray_access import check_packages
from rlctl.runtime.training.profile import check_profile
from rlctl.runtime.training.stopping import Watchdog
from tests.settings import given


@pytest.fixture
def no_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", lambda *_: None)


def test_callbacks_run_at_breakpoints_of_their_block(no_debugger: None) -> None:
    reached: list[int] = []
    with debugging.on_breakpoint(lambda: reached.append(1)):
        breakpoint()
    breakpoint()
    assert reached == [1]


def test_calls_have_a_week_with_post_mortem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert debugging.call_limit(60.0) == 60.0
    monkeypatch.setenv("RAY_DEBUG_POST_MORTEM", "1")
    assert debugging.call_limit(60.0) == 7 * 24 * 3600
    assert debugging.debug_variables()["RAY_DEBUG_POST_MORTEM"] == "1"


def test_post_mortem_needs_debugpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_DEBUG_POST_MORTEM", "1")
    monkeypatch.setattr("rlctl.packages.find_spec", lambda _name: None)
    init = compose("grpo", []).config.ray_kwargs.ray_init
    with pytest.raises(MissingExtraError, match="debugpy"):
        check_packages(init)


@pytest.mark.parametrize("where", ["this process", "a worker", None])
def test_the_watchdog_waits_for_a_process_in_a_breakpoint(
    where: str | None, tmp_path: Path, no_debugger: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired: list[str] = []
    monkeypatch.setattr("rlctl.runtime.training.stopping._CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(Watchdog, "_expire", lambda _self: expired.append("killed"))
    with Watchdog(3600, tmp_path / "stacks.txt", lambda _: None) as watchdog:
        if where == "this process":
            breakpoint()
        elif where == "a worker":
            (tmp_path / "main-0.breakpoint").touch()
        watchdog.limit_s = 0.05
        watchdog.begin("learning")
        deadline = time.monotonic() + (600.0 if where is None else 0.3)
        while not expired and time.monotonic() < deadline:
            time.sleep(0.01)
    assert bool(expired) == (where is None)


def run_of(process: DriverProcess, root: Path) -> str:
    run = RunDir.create(root, "p", "r", "grpo")
    run.update(process=process, state="running")
    return "r"


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[str]]:
    code = "import time\ndef wait_for_data():\n    print(1, flush=True)\n    time.sleep(600)\n"
    command = [sys.executable, "-c", code + "wait_for_data()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_stacks_of_a_running_run(waiting: subprocess.Popen[str], tmp_path: Path) -> None:
    run = RunStore(tmp_path).find(run_of(DriverProcess.current(), tmp_path))
    found = {process.pid: process for process in stacks.run_processes(run)}
    assert next(iter(found.values())).name == "controller"
    assert waiting.pid in found
    assert all(process.cpu_s == round(process.cpu_s, 2) for process in found.values())
    try:
        text = stacks.stacks(waiting.pid)
    except ResourceError:
        pytest.skip("this machine does not allow ptrace")
    assert "wait_for_data" in text


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("echo 'Permission Denied: Try running again' >&2; exit 1", ResourceError, "ptrace"),
        ("echo 'Error: no such process' >&2; exit 1", rlctl.RlctlError, "no such process"),
        ("exit 3", rlctl.RlctlError, "exit code 3"),
        (None, MissingExtraError, "py-spy"),
    ],
)
def test_py_spy_may_be_missing_or_refused(
    script: str | None,
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if script is not None:
        spy = tmp_path / "py-spy"
        spy.write_text(f"#!/bin/sh\n{script}\n")
        spy.chmod(0o755)
    with pytest.raises(error, match=message):
        stacks.stacks(1)


def test_a_run_that_has_ended_or_is_elsewhere_has_no_processes(tmp_path: Path) -> None:
    here = DriverProcess.current()
    for process, message in [
        (replace(here, host="other"), "runs on other"),
        (replace(here, started=1.0), "is lost"),
    ]:
        root = tmp_path / process.host / str(process.started)
        with pytest.raises(ConflictError, match=message):
            stacks.run_processes(RunStore(root).find(run_of(process, root)))


def test_profile_settings_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    profile = compose("grpo", ["trainer.profile.steps=[9]", "trainer.profile.ranks=[0,2]"])
    with pytest.raises(ConfigError, match="no pool has rank 2: the largest has 2 processes"):
        check_profile(profile.config.trainer.profile, {"main": 2}, 3)
    check_profile(profile.config.trainer.profile, {"main": 3}, 3)
    assert "step 9 has no profile" in caplog.text


@pytest.mark.plugin("bridges")
def test_verl_keys_become_profile_settings() -> None:
    role = "actor_rollout_ref.actor.profiler"
    composed = compose(
        "grpo",
        [
            *("global_profiler.tool=torch", "global_profiler.steps=[1,2]"),
            *(f"{role}.enable=true", f"{role}.ranks=[0,1]", f"{role}.all_ranks=false"),
            "global_profiler.save_path=somewhere",
        ],
    ).config.trainer.profile
    assert (composed.steps, composed.ranks) == ((1, 2), (0, 1))


@pytest.mark.slow
def test_a_chosen_step_is_traced_for_perfetto(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = given(batch=2, mini_batch=2, train_rows=2, val=None, response=3, n=2, steps=1)
    run = rlctl.train("grpo", [*small, "trainer.profile.steps=[1]"], inline=True)
    assert details(run)["profiles"] == ["profiles/step_000001/main-0.json"]
    events = json.loads((run.path / "profiles/step_000001/main-0.json").read_text())["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    assert all({"name", "pid", "tid", "ts", "dur"} <= set(event) for event in complete)
    names = {event["name"] for event in complete}
    assert {"ActorWorker.generate_sequences", "ActorWorker.update", "aten::mm"} <= names
    print_run(run)
    assert "main-0.json" in capsys.readouterr().out
