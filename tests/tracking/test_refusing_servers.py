"""A tracker's server that refuses: offline with its reason, or one error if it was requested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import ResourceError
from rlctl.tracking import server_api
from rlctl.tracking.loggers import preflight
from tests.processes import run_python
from tests.tracking.faults import KINDS, Switch
from tests.tracking.real import in_a_home
from tests.tracking.swanlab_server import swanlab_server
from tests.tracking.wandb_server import wandb_server

SERVERS: dict[str, Any] = {"wandb": wandb_server, "swanlab": swanlab_server}
HOSTS = {"wandb": "WANDB_BASE_URL", "swanlab": "SWANLAB_API_HOST"}
REASONS = {
    "401": "the key is refused by 127.0.0.1:",
    "403": "access is forbidden by 127.0.0.1:",
    "500": "fails with status 500",
    "hang": "does not answer within",
    "closed": "closes connections",
    "unreachable": "cannot be reached",
}
SLOW = "slow"
KEYS = {"WANDB_API_KEY": "k" * 40, "SWANLAB_API_KEY": "k" * 21}


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Switch]:
    """Switch of a server; the trackers have a key and a home of their own."""
    monkeypatch.setattr(server_api, "PROBE_S", 1.0)
    for name, value in (KEYS | {"HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    made = Switch()
    yield made
    made.set("")


@pytest.mark.parametrize(("logger", "fault"), list(product(SERVERS, REASONS)))
def test_a_server_that_refuses_is_no_reason_to_end_a_run(switch, monkeypatch, logger, fault):
    with SERVERS[logger](switch) as (address, _):
        host = "http://127.0.0.1:9" if fault == "unreachable" else address
        monkeypatch.setenv(HOSTS[logger], host)
        switch.set("" if fault == "unreachable" else fault)
        mode = preflight(logger, None)
        assert mode.startswith("offline: "), mode
        assert REASONS[fault] in mode
        assert f"`{logger} sync` sends the files later" in mode
        with pytest.raises(ResourceError, match=REASONS[fault]) as error:
            preflight(logger, "online")
        assert "offline" in str(error.value)
        switch.set("")


@pytest.mark.plugin("bridges")
@pytest.mark.parametrize("fault", [fault for fault in REASONS if fault != "unreachable"])
def test_an_address_of_mlflow_counts_as_requested(switch, monkeypatch, fault):
    with wandb_server(switch) as (address, _):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        switch.set(fault)
        with pytest.raises(ResourceError, match=f"MLflow: .*{REASONS[fault]}"):
            preflight("mlflow", None)
        switch.set("")


@pytest.mark.parametrize("logger", SERVERS)
def test_a_slow_server_is_used(switch, monkeypatch, logger):
    monkeypatch.setattr(server_api, "PROBE_S", 60.0)
    with SERVERS[logger](switch) as (address, _):
        monkeypatch.setenv(HOSTS[logger], address)
        switch.set(SLOW)
        assert preflight(logger, None) == "online: key found"


@pytest.mark.soak
@pytest.mark.parametrize(("logger", "fault"), list(product(SERVERS, KINDS)))
def test_attempts_start_and_resume_however_a_server_fails(tmp_path, logger, fault):
    """Check with the real SDK: a fault at once, and one after the test of the key."""
    cases = list(product([logger], [fault], (0, 1), ("start", "resume"), ("", "online")))
    given: list[Any] = []
    with ExitStack() as stack:
        for logger, fault, after, when, mode in cases:
            address, _ = stack.enter_context(SERVERS[logger](Switch()))
            given.append([logger, fault, after, when, mode, address])
        environment = in_a_home(tmp_path) | KEYS
        words = ("-m", "tests.tracking.starting", json.dumps([str(tmp_path), given]))
        done = run_python(*words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    wrong: list[str] = []
    for case, (modes, seconds, console) in zip(cases, results, strict=True):
        _, fault, after, when, mode = case
        is_stuck = fault == "hang" and after  # the SDK's start hangs
        lines = [line for line in console.splitlines() if line]
        if fault == SLOW:
            is_right = modes[-1] == "online"
        elif mode:
            is_right = modes[-1].startswith("error") and len(lines) <= 1 + (when == "resume")
            is_right &= REASONS[fault] in modes[-1] or (is_stuck and "within" in modes[-1])
        else:
            is_right = modes[-1] == "offline"
            is_right &= len(lines) == 1 + (when == "resume")
            is_right &= REASONS[fault] in lines[-1] or (is_stuck and "within" in lines[-1])
        if not is_right or (after == 0 and mode and fault != SLOW and seconds > 60):
            wrong.append(f"{case}: {modes} in {seconds:.0f} s\n{console}")
    assert not wrong, "\n".join(wrong)
