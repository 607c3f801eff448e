"""Start of Ray: daemons that end during it are named at once, and a second start is tried."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from rlctl.errors import ResourceError
from rlctl.recipes.compose import compose
from rlctl.runtime.cluster import start_deadline
from rlctl.runtime.cluster.ray_start import DaemonEndedError, RayStart, reasons
from rlctl.runtime.cluster.session import ray_session
from rlctl.runtime.cluster.start_deadline import LoadedDeadline

FATAL = "[2026-11-28 02:44:57,785 C 92 92] (raylet) main.cc:1: Check failed: no space for sockets"
LOG = f"""[2026-11-28 02:44:57,700 I 92 92] (raylet) main.cc:1: Starting
{FATAL}
*** StackTrace Information ***
[2026-11-28 02:44:57,785 E 92 92] (raylet) logging.cc:474:     @     0x56432d620889   main
"""


def logs_of(folder: Path, text: str) -> Path:
    log = folder / "session_2026-11-28/logs/raylet.out"
    log.parent.mkdir(parents=True)
    log.write_text(text)
    return log


def test_the_first_failed_check_is_shown_without_its_stack(tmp_path: Path) -> None:
    log = logs_of(tmp_path, LOG)
    assert reasons(tmp_path) == f"{log}\n    {FATAL}"


def test_the_signal_is_shown_if_no_check_failed(tmp_path: Path) -> None:
    log = logs_of(tmp_path, "Starting\n*** SIGBUS received at time=1 on cpu 1 ***\n    @  main\n")
    assert reasons(tmp_path) == f"{log}\n    *** SIGBUS received at time=1 on cpu 1 ***"


def test_a_daemon_that_ends_is_noticed_while_ray_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray.init` would wait until its own deadline: here it waits until the start is given up."""
    raylet = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", raylet)
    logs_of(tmp_path, LOG)
    start = RayStart(set(psutil.Process().children(recursive=True)))
    daemons: list[subprocess.Popen[bytes]] = []

    def init() -> None:
        daemons.append(subprocess.Popen([raylet, "600"]))
        while start._ended_daemon() is None and not start._daemons:
            time.sleep(0.01)
        daemons[0].send_signal(signal.SIGABRT)
        start.given_up.wait()
        raise RuntimeError("the node is not registered")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(DaemonEndedError, match="Ray's raylet ended while Ray was") as caught:
        start.run({}, tmp_path, timeout_s=600)
    assert "Check failed: no space for sockets" in str(caught.value)
    assert start.has_returned(600)
    start.close()
    daemons[0].wait()


def test_a_deadline_without_logs_is_an_error_of_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    start = RayStart(set())
    monkeypatch.setattr(ray, "init", start.given_up.wait)
    with pytest.raises(ResourceError, match=r"did not start within 0\.01 s"):
        start.run({}, None, timeout_s=0.01)
    start.close()


@pytest.mark.soak
def test_ray_starts_again_after_its_raylet_has_aborted(caplog: pytest.LogCaptureFixture) -> None:
    """Ray's own wait for the first raylet lasts half a minute and cannot be interrupted."""
    others = set(psutil.Process().children(recursive=True))

    def abort_the_first_raylet() -> None:
        while True:
            for process in set(psutil.Process().children()) - others:
                with suppress(psutil.Error):
                    if process.name() == "raylet":
                        os.kill(process.pid, signal.SIGABRT)
                        return
            time.sleep(0.01)

    threading.Thread(target=abort_the_first_raylet, daemon=True).start()
    init = compose("ppo").config.ray_kwargs.ray_init
    with caplog.at_level(logging.WARNING), ray_session(init, 1, 1, timeout_s=300):
        assert ray.cluster_resources()["CPU"] == 1
    assert "Ray's raylet ended while Ray was starting" in caplog.text


def test_a_deadline_lasts_longer_for_each_process_that_waits_for_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    idle, busy = (LoadedDeadline(60, lambda factor=factor: factor) for factor in (1.0, 5.0))
    now[0] += 61
    assert (idle.is_over(), busy.is_over()) == (True, False)
    now[0] += 300
    assert busy.is_over()


def test_the_load_of_the_machine_counts_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_deadline, "allowed_cores", lambda: 2)
    found: list[float] = []
    for average in (0.1, 2.0, 8.0, 900.0):
        monkeypatch.setattr(os, "getloadavg", lambda average=average: (average, 0.0, 0.0))
        found.append(start_deadline.slowness())
    assert found == [1.0, 1.0, 4.0, 10.0]
    monkeypatch.delattr(os, "getloadavg")
    assert start_deadline.slowness() == 1.0
