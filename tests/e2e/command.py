"""The command `rlctl` as a user runs it, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.forks import Forked, completed
from tests.progress import wait_until

TIMEOUT_S = 1200  # of commands that are not forked

# What depends on the clock or the machine; everything else a seed decides.
_OF_THE_CLOCK = (
    "timing_s/",
    "timing_per_token_ms/",
    "perf/time_per_step",
    "perf/throughput",
    "perf/cpu_memory_used_gb",
    "perf/mfu/",
)


def environment() -> dict[str, str]:
    """A shell's. What Ray has left in this process's, when a test has started it here, is none of the command's: its way to authenticate is
    known to Ray's library before a forked process sees it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return own | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": ""}


def rlctl(
    *arguments: object,
    cwd: Path,
    code: int = 0,
    more: Mapping[str, str] | None = None,
    process: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with `more` in its environment, and check the exit code.

    The process is forked from one that has imported everything; with `process` it is `python -m rlctl` as a shell starts it.
    """
    words, env = list(map(str, arguments)), environment() | (more or {})
    if process:
        command = [sys.executable, "-m", "rlctl", *words]
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    else:
        done = completed(words, cwd, env)
    assert done.returncode == code, (
        f"exit {done.returncode}, wanted {code}\n{done.stdout}\n{done.stderr}"
    )
    return done


def begun(
    *arguments: object, cwd: Path, marker: str = "", process: bool = False
) -> subprocess.Popen[str] | Forked:
    """Started, in a session of its own, with `marker` in the environment of whatever it starts."""
    words, env = list(map(str, arguments)), environment() | {"RLCTL_TEST_MARKER": marker}
    if not process:
        return Forked(words, cwd, env)
    command = [sys.executable, "-m", "rlctl", *words]
    return subprocess.Popen(
        command, cwd=cwd, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_steps(process: subprocess.Popen[str] | Forked, run: Path, steps: int) -> None:
    """Wait until the process has written `steps` lines of metrics."""
    lines = run / "metrics.jsonl"

    def written() -> bool:
        return lines.exists() and lines.read_text().count("\n") >= steps

    wait_until(lambda: written() or process.poll() is not None, process.pid, f"step {steps}")
    assert written(), process.stderr and process.stderr.read()


def with_marker(marker: str) -> list[psutil.Process]:
    """Every process whose environment carries the marker: Ray's daemons leave the process tree, not their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get("RLCTL_TEST_MARKER") == marker
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until_gone(marker: str) -> None:
    """None of them lives on, after a moment for those that are just ending."""
    deadline = time.monotonic() + 300
    while with_marker(marker) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert with_marker(marker) == []


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def reproducible(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    return [
        {name: value for name, value in row.items() if not name.startswith(_OF_THE_CLOCK)}
        for row in metrics(run)
    ]
