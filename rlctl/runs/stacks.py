"""Python processes of a running run on this machine, and their stacks by py-spy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlctl.errors import ConflictError, MissingExtraError, ResourceError, RlctlError
from rlctl.process import FORK_SERVER
from rlctl.runs.run import Run

_SPY_S = 30.0
# Ray itself, beside the workers: titles of processes, and folders of scripts.
_RAY = (
    *("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent"),
    *("/ray/dashboard/", "/ray/_private/", "/ray/autoscaler/", "/cluster/fork_client.py"),
)
_LOGS = "attempts/latest/ of the run has the logs, and the stacks of a run that hung"
_REFUSED = ("Permission Denied", "Operation not permitted")


@dataclass(frozen=True)
class RunProcess:
    """Process of a run: the controller, a worker or a reward process."""

    pid: int
    name: str
    status: str  # of the operating system, such as sleeping
    cpu_s: float


def run_processes(run: Run) -> list[RunProcess]:
    """Return the Python processes of a run on this machine, the controller first.

    Raises ConflictError if the run is not running, or runs on another machine.
    """
    driver = run.readable_record().process
    alive = driver.alive(run.path)
    if alive is False:
        raise ConflictError(f"{run.name} is {run.state}", where=str(run.path), hint=_LOGS)
    if not (alive and driver.is_visible):
        raise ConflictError(
            f"{run.name} runs on {driver.host}", where=str(run.path), hint="run this command there"
        )
    found: list[RunProcess] = []
    for process in _with_children(driver.pid):
        with suppress(psutil.Error):  # it has ended
            command = " ".join(process.cmdline())
            if _is_python(process, command):
                times = process.cpu_times()
                name = _name(command)
                if process.pid == driver.pid:
                    name = "controller"
                cpu_s = round(times.user + times.system, 2)
                found.append(RunProcess(process.pid, name, process.status(), cpu_s))
    if not found:
        raise ConflictError(f"{run.name} has just ended", where=str(run.path), hint=_LOGS)
    return found


def _with_children(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; an empty list if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def stacks(pid: int) -> str:
    """Return the Python stacks of all threads of a process.

    Raises MissingExtraError without py-spy, ResourceError without the permission to read another
    process.
    """
    beside = Path(sys.executable).with_name("py-spy")
    spy = shutil.which("py-spy")
    if beside.is_file():
        spy = str(beside)
    if spy is None:
        raise MissingExtraError(
            "the stacks of processes need py-spy", hint="pip install 'rlctl[debug]'"
        )
    try:
        done = subprocess.run(
            [spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_SPY_S
        )
    except subprocess.TimeoutExpired as error:
        raise RlctlError(f"py-spy did not read process {pid} within {_SPY_S:g} s") from error
    if done.returncode == 0:
        return done.stdout
    reason = done.stderr.strip()
    if any(text in reason for text in _REFUSED):
        raise ResourceError(
            f"the system does not let this user read process {pid} (ptrace)",
            hint="run the command with sudo, or allow it: `sysctl kernel.yama.ptrace_scope=0` on "
            "the machine, or `--cap-add SYS_PTRACE` for a container",
        )
    first = next(iter(reason.splitlines()), f"exit code {done.returncode}")
    raise RlctlError(f"py-spy cannot read process {pid}: {first}")


def _is_python(process: psutil.Process, command: str) -> bool:
    """Return True for Python, without Ray's scripts and idle workers."""
    if any(name in command for name in _RAY) or process.name() == FORK_SERVER:
        return False
    return command.startswith("ray::") or Path(process.exe()).name.startswith("python")


def _name(command: str) -> str:
    """Return a short name: Ray's title of a worker, or the module or script that Python runs."""
    words = command.split()
    if command.startswith("ray::"):
        return words[0]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    script = next((word for word in words[1:] if not word.startswith("-")), words[0])
    return Path(script).name
