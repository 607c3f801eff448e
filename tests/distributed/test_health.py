"""End of a process whose Ray cluster has lost its GCS or raylet."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.progress import wait_until

# The main thread waits in a call that nothing interrupts; `on_lost` records the end.
BLOCKED = """
import sys, threading
from pathlib import Path
import psutil
from rlctl.runtime.cluster import health
health._GRACE_S = 0.5
others = set(psutil.Process().children(recursive=True))
import subprocess
for name in ("gcs_server", "raylet"):
    print(subprocess.Popen([f"{sys.argv[1]}/{name}", "600"]).pid)
watch = health.RayHealth(others, lambda error: Path(sys.argv[1], "lost").touch())
watch.start(None)
print("started", flush=True)
blocked = threading.Lock()
blocked.acquire()
blocked.acquire()
"""

WITH_RAY = """
import ray, sys, time
from rlctl.errors import RlctlError
from rlctl.recipes.compose import compose
from rlctl.runtime.cluster.session import ray_session
init = compose("ppo").config.ray_kwargs.ray_init
with ray_session(init, 2, 1, 600.0, lambda _: print("recorded", flush=True)):
    @ray.remote
    def wait():
        time.sleep(3600)
    waiting = wait.remote()
    print("started", flush=True)
    ray.get(waiting)
"""


def test_blocked_process_exits_and_kills_its_children(tmp_path: Path) -> None:
    for daemon in ("gcs_server", "raylet"):
        (tmp_path / daemon).symlink_to("/bin/sleep")
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(tmp_path)], stdout=-1, stderr=-1, text=True
    )
    pids = [int(process.stdout.readline()) for _ in range(2)]
    assert process.stdout.readline() == "started\n"
    daemons = [psutil.Process(pid) for pid in pids]
    daemons[1].kill()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1
    assert errors.splitlines() == [
        f"error: Ray's raylet (process {pids[1]}) has exited",
        "  help: `rlctl resume` continues the run from its latest checkpoint",
    ]
    assert (tmp_path / "lost").exists()
    assert_gone(daemons)


@pytest.mark.soak
@pytest.mark.parametrize(("daemon", "name"), [("gcs_server", "GCS"), ("raylet", "raylet")])
def test_killed_daemon_ends_a_process_that_waits_for_a_task(daemon: str, name: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", WITH_RAY], stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "started\n"
    started = psutil.Process(process.pid).children(recursive=True)
    (killed,) = [each for each in started if _read(each.name) == daemon]
    killed.kill()
    wait_until(lambda: process.poll() is not None, process.pid, "the end")
    out, errors = process.communicate()
    assert process.returncode == 1, errors
    assert out.endswith("recorded\n"), out  # Ray prints the log of a lost raylet
    assert f"error: Ray's {name} (process {killed.pid}) has exited" in errors
    assert_gone(started)


def assert_gone(processes: list[psutil.Process]) -> None:
    """Wait until the processes have exited; nobody may have reaped them."""
    left = processes
    deadline = time.monotonic() + 600
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [each for each in left if _read(each.status) not in (None, psutil.STATUS_ZOMBIE)]
    assert not left


def _read(property_of: Callable[[], str]) -> str | None:
    """Return a property of a process; None if the process does not exist."""
    try:
        return property_of()
    except psutil.NoSuchProcess:
        return None
