"""The command `rlctl` as a user runs it, and the records that a run leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rlctl.cli.explain.metric_entries import metric_entry
from tests.forks import Forked, completed
from tests.progress import wait_until
from tests.recorded import called

TIMEOUT_S = 1200  # of commands that are not forked

# Metrics that depend on the clock or the machine; the seed determines all others.
_OF_THE_CLOCK = (
    "timing_s/",
    "timing_per_token_ms/",
    "perf/time_per_step",
    "perf/throughput",
    "perf/cpu_memory_used_gb",
    "perf/process_memory_gb/",
    "perf/mfu/",
    "async/trainer_idle",
    "async/engines_idle",
)


# Recipes that `rlctl train ppo` refuses, and the word for them.
VERBS = {each: each for each in ("sft", "dpo", "online_dpo", "distill", "raft", "rm")}


def environment() -> dict[str, str]:
    """Return the environment of a shell, without the variables that rlctl and Ray set here.

    A forked process must not inherit them: Ray reads its authentication mode before the fork, and
    another machine has other network interfaces.
    """
    set_here = ("RAY_", "GLOO_SOCKET_IFNAME")
    own = {name: value for name, value in os.environ.items() if not name.startswith(set_here)}
    return own | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": ""}


def rlctl(
    *arguments: object,
    cwd: Path,
    code: int = 0,
    more: Mapping[str, str] | None = None,
    fork: bool = False,
    process: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `more` in its environment, and check the exit code.

    It runs in this process if it needs no other one, as Ray does, and has the usual environment.
    Else, or with `fork`, its process is forked from one that has imported everything; with
    `process` it is `python -m rlctl`.
    """
    words, env = list(map(str, arguments)), environment() | (more or {})
    if not (fork or process or more) and _runs_here(words):
        done = called(*words, cwd=cwd)
    elif process:
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


def train(verb: str, name: str, *settings: object, cwd: Path, **how: Any) -> Path:
    """Train to the end and return the folder of the run; see `rlctl` for `how`."""
    rlctl("train", verb, "--name", name, *settings, cwd=cwd, **how)
    [run] = cwd.glob(f"runs/[!.]*/{name}")
    return run


def _runs_here(words: list[str]) -> bool:
    """Return True for a command that needs neither Ray nor a supervisor."""
    alone = {"--inline", "--dry-run"} & {*words} and "--retries" not in words
    return bool(alone) or words[0] not in ("train", "resume", "sweep", "engines")


def start(
    *arguments: object, cwd: Path, marker: str = "", process: bool = False
) -> subprocess.Popen[str] | Forked:
    """Start a command in its own session, with `marker` in the environment of all its processes."""
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
    """Return every process whose environment has the marker, and forks with the marker's file.

    Ray's daemons leave the process tree but keep their environment.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and (
                process.environ().get("RLCTL_TEST_MARKER") == marker
                or f"/memfd:{marker} (deleted)" in open_files(process.pid)
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def open_files(pid: int) -> list[str]:
    """Return the files of the process's descriptors, also those without a path."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has exited
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has closed this one
                found.append(os.readlink(entry))
    return found


def wait_until_gone(marker: str) -> None:
    """Wait until no process with the marker is left."""
    deadline = time.monotonic() + 300
    while with_marker(marker) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert with_marker(marker) == []


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, after a check that `rlctl explain` knows each metric."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    unknown = {name for row in rows for name in row if name != "step" and not metric_entry(name)}
    assert unknown == set(), "describe it in rlctl/cli/explain/metrics.toml"
    return rows


def reproducible(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without values that depend on the clock or machine."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(_OF_THE_CLOCK) and not name.endswith("/seconds")
        }
        for row in metrics(run)
    ]


def remove_run(run: Path, elsewhere: Path) -> None:
    """Remove a run and its files in another folder, with the mark of the name there."""
    shutil.rmtree(run, ignore_errors=True)
    copies = elsewhere / run.parent.name
    shutil.rmtree(copies / run.name, ignore_errors=True)
    (copies / f".{run.name}.run").unlink(missing_ok=True)
