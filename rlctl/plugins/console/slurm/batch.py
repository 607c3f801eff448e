"""Jobs of SLURM: the script of a run, its submission, and why it waits."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlctl.cli.stderr import notice
from rlctl.errors import ConflictError, ResourceError, RlctlError, UsageError
from rlctl.plugins.console.queue.orders import Line
from rlctl.recipes.durations import parse_duration
from rlctl.runs.run import ACTIVE, read_run
from rlctl.suggest import overridden_keys

FOLDER = ".slurm"  # in that of a project; lists of runs leave it out
OPTION = "--slurm"
_LEAD_S = 300  # of the signal before the time limit
_OURS = {"job-name", "output", "error", "array", "wrap", "open-mode"}
_TIMEOUT_S = 60
_POLL_S = 2.0
# Ray on all nodes: this one, the first of the job, is the head.
_RAY = """\
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
[ -s "$HOME/.ray/auth_token" ] || (umask 077 && ray get-auth-token --generate >/dev/null)
RAY_ADDRESS=$(python -c 'import ray, socket; s = socket.socket(); s.bind(("", 0))
print(ray.util.get_node_ip_address(), s.getsockname()[1], sep=":")')
export RAY_ADDRESS
nodes='import ray; ray.init(logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))'
wait_for() { # NODES: at most ten minutes
    until [ "$(timeout -s KILL 60 python -c "$nodes" 2>/dev/null)" = "$1" ]; do
        if [ "$SECONDS" -gt 600 ]; then echo "Ray has fewer than $1 nodes" >&2; exit 7; fi
        sleep 5
    done
}
srun --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" \\
    ray start --head --port="${RAY_ADDRESS#*:}" --include-dashboard=false --block &
wait_for 1
srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$SLURMD_NODENAME" \\
    ray start --address="$RAY_ADDRESS" --block &
wait_for "$SLURM_NNODES"
"""


@dataclass(frozen=True)
class Job:
    """Job of a run. Its `folder` has the script, its output, and `job.json`: what it runs."""

    folder: Path

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.folder.name

    @property
    def run(self) -> Path:
        """Folder of the run, which the job creates."""
        return self.folder.parent.parent / self.name

    @property
    def id(self) -> str:
        """Number of the job; empty if the submission was interrupted."""
        file = self.folder / "id"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @property
    def output(self) -> Path:
        """Output of the job, in all of its starts."""
        return self.folder / "slurm.out"

    def state(self) -> tuple[str, str] | None:
        """Return state and reason of the job, such as PENDING and Resources; None if it is over."""
        which = [f"--jobs={self.id}"] if self.id else [f"--name={self.name}", "--me"]
        done = _run("squeue", "--noheader", "--format=%T|%r|%S", *which)
        if done.returncode or not done.stdout.strip():
            if done.returncode and "Invalid job id" not in done.stderr:
                raise ResourceError(f"squeue failed: {done.stderr.strip()}")
            return None
        state, reason, start = done.stdout.split()[0].split("|")
        when = "" if start == "N/A" else f", to start at {start}"
        return state, f"{state.lower()} ({reason}{when})"

    def waiting(self) -> Iterator[str]:
        """Yield why the job waits, at each change, until its run is active or the job is over."""
        last = ""
        while (state := self.state()) is not None:
            if (self.run / "run.json").exists() and read_run(self.run).state in ACTIVE:
                return
            if state[1] != last:
                yield state[1]
            last = state[1]
            time.sleep(_POLL_S)
        if not (self.run / "run.json").exists():
            tail = self.output.read_text(errors="replace") if self.output.exists() else ""
            errors = [line for line in tail.splitlines() if line.startswith(("error: ", "slurm"))]
            message = f"the job {self.id} of {self.name} ended before its run began"
            raise RlctlError(message, where=str(self.output), hint=(errors or [None])[-1])

    def cancel(self) -> None:
        """Cancel the job."""
        _run("scancel", self.id)


def find(root: Path, name: str) -> Job | None:
    """Return the job of the run of this name, or beginning of a name, under `root`."""
    jobs = [Job(file.parent) for file in root.glob(f"[!.]*/{FOLDER}/*/job.json")]
    exact = [job for job in jobs if job.name == name]
    found = exact or [job for job in jobs if job.name.startswith(name)]
    return found[0] if len(found) == 1 else None


def submit(line: Line, spec: str) -> Job:
    """Write the script of a run and submit it. Raises ResourceError if SLURM refuses it."""
    options = parse(spec)
    job = Job(line.folder.parent / FOLDER / line.folder.name)
    if job.folder.exists() and job.state() is not None:
        raise ConflictError(f"the job {job.id} of the run {job.name} has not ended")
    nodes = int(options.get("nodes") or 1)
    words = list(line.words)
    if nodes > 1 and "trainer.nnodes" not in overridden_keys(words):
        words.append(f"trainer.nnodes={nodes}")
    job.folder.mkdir(0o700, parents=True, exist_ok=True)
    script = job.folder / "job.sh"
    script.write_text(_script(job, options, nodes), encoding="utf-8")
    order = {"words": words, "again": line.again, "run": str(job.run), "python": sys.executable}
    (job.folder / "job.json").write_text(json.dumps(order), encoding="utf-8")
    done = _run("sbatch", "--parsable", str(script))
    if done.returncode:
        (job.folder / "job.json").unlink()
        raise ResourceError(
            f"sbatch refused the job: {done.stderr.strip()}",
            where=str(script),
            hint=f"change {OPTION}",
        )
    (job.folder / "id").write_text(done.stdout.strip().split(";")[0], encoding="utf-8")
    return job


def parse(spec: str) -> dict[str, str]:
    """Return the options of sbatch in `nodes=2 time=24:00:00 exclusive`."""
    options: dict[str, str] = {}
    for word in shlex.split(spec):
        key, _, value = word.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*", key) or "\n" in value:
            hint = "'nodes=2 time=24:00:00 partition=a', as options of sbatch without dashes"
            raise UsageError(f"{word!r} is no option of sbatch", where=OPTION, hint=hint)
        if key in _OURS:
            raise UsageError(f"rlctl sets {key} itself", where=OPTION, hint=f"leave out {key}")
        options[key] = value
    if not (options.get("nodes") or "1").isdigit():
        raise UsageError("nodes is a whole number", where=OPTION)
    return options


def follow(job: Job) -> None:
    """Print why the job waits and then its run, until it is over."""
    from rlctl.cli.commands.watch import watch

    while True:
        for reason in job.waiting():
            notice(f"job {job.id}: {reason}")
        if not (job.run / "run.json").exists() or read_run(job.run).state not in ACTIVE:
            return
        watch(str(job.run))


def _script(job: Job, options: dict[str, str], nodes: int) -> str:
    ours = {
        "job-name": job.name,
        "output": str(job.output),
        "open-mode": "append",
        "requeue": "",
        "signal": f"B:USR1@{_lead(options.get('time', ''))}",
        "ntasks-per-node": "1",
    }
    lines = [
        f"#SBATCH --{key}={shlex.quote(value)}" if value else f"#SBATCH --{key}"
        for key, value in (ours | options).items()
    ]
    python = Path(sys.executable)
    ray = f"PATH={shlex.quote(str(python.parent))}:$PATH\n{_RAY}" if nodes > 1 else ""
    command = shlex.join([str(python), "-P", "-m", "rlctl.plugins.console.slurm.job"])
    return "\n".join(
        ["#!/bin/bash", *lines, "set -eu", f"{ray}exec {command} {shlex.quote(str(job.folder))}\n"]
    )


def _lead(time_limit: str) -> int:
    """Return the seconds before the time limit at which the run saves: at most a quarter of it."""
    if time_limit.isdigit():  # minutes
        time_limit += "m"
    limit = parse_duration(time_limit) if time_limit else None
    return _LEAD_S if limit is None else min(_LEAD_S, int(limit.total_seconds() // 4))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM. Raises ResourceError if it is missing or does not answer."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        hint = "use a login node of the cluster"
        raise ResourceError(f"{command[0]} of SLURM is not here", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        raise ResourceError(f"{command[0]} did not answer within {_TIMEOUT_S} s") from error
