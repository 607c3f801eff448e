"""Jobs of SLURM: the script of a run, its submission, and why it waits."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from typing import Any

from rlctl.cli.stderr import notice
from rlctl.errors import ConfigError, ConflictError, ResourceError, RlctlError, UsageError
from rlctl.plugins.console.queue.orders import Line
from rlctl.plugins.console.slurm.job import ON_SLURM, release_sweep, runs_of
from rlctl.recipes.durations import parse_duration
from rlctl.runs.run import ACTIVE, read_run
from rlctl.suggest import did_you_mean, overridden_keys
from rlctl.sweeps.sweep_record import SweepDir

FOLDER = ".slurm"  # in that of a project; lists of runs leave it out
OPTION = "--slurm"
_LEAD_S = 300  # of the signal before the time limit
_NAME = re.compile(r"--([a-z][a-z-]+)")
_OURS = {"job-name", "output", "error", "array", "wrap", "open-mode"}
_HERE = "use a login node of the cluster; on this machine `rlctl queue add` runs the same command"
_UNREACHABLE = ("configuration source", "Unable to contact", "Zero Bytes")
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
    """Job of a run or sweep. Its `folder` has the script, its output, and `job.json`: what it runs.

    A sweep may have an array of jobs, one per run, and this one after it.
    """

    folder: Path

    @property
    def name(self) -> str:
        """Name of the run or sweep."""
        return self.folder.name

    @property
    def run(self) -> Path:
        """Folder of the run, which the job creates."""
        return self.folder.parent.parent / self.name

    @property
    def id(self) -> str:
        """Number of the job; empty if the submission was interrupted."""
        return next(iter(self.ids), "")

    @property
    def ids(self) -> Sequence[str]:
        """Numbers of the job and of its array."""
        with suppress(FileNotFoundError):
            return (self.folder / "id").read_text(encoding="utf-8").split()
        return []

    @property
    def output(self) -> Path:
        """Output of the job, in all of its starts."""
        return self.folder / "slurm.out"

    def state(self) -> tuple[str, str] | None:
        """Return state and reason of the job, such as PENDING and Resources; None if it is over.

        With an array it is RUNNING if any of the jobs is, and the reason is that of each.
        """
        which = [f"--name={self.name}", "--me"]
        if self.ids:
            which = [f"--jobs={','.join(self.ids)}"]
        done = run("squeue", "--noheader", "--array", "--format=%T|%r|%S", *which)
        if done.returncode or not done.stdout.strip():
            if done.returncode and "Invalid job id" not in done.stderr:
                raise _no_answer(done.stderr)
            return None
        states = list[str]()
        texts = Counter[str]()
        for line in done.stdout.strip().splitlines():
            state, reason, start = line.split("|")
            when = "" if start == "N/A" else f", to start at {start}"
            texts["running" if state == "RUNNING" else f"{state.lower()} ({reason}{when})"] += 1
            states.append(state)
        text = ", ".join(f"{count} {text}" for text, count in texts.items())
        if len(states) == 1:
            text = next(iter(texts))
        return "RUNNING" if "RUNNING" in states else states[0], text

    def waiting(self) -> Iterator[str]:
        """Yield why the job waits, at each change, until its run is active or the job is over."""
        last = ""
        while (state := self.state()) is not None:
            if self.is_active():
                return
            if state[1] != last:
                yield state[1]
            last = state[1]
            time.sleep(_POLL_S)
        if not runs_of(self.run):
            outputs = sorted(self.folder.glob("slurm*.out"))
            lines = "\n".join(file.read_text(errors="replace") for file in outputs).splitlines()
            errors = [line for line in lines if line.startswith(("error: ", "slurm"))]
            message = f"the job {self.id} of {self.name} ended before its run began"
            raise RlctlError(message, where=str(self.output), hint=(errors or [None])[-1])

    def is_active(self) -> bool:
        """Return True if the run, or any of the sweep, has begun and not ended."""
        return any(read_run(folder).state in ACTIVE for folder in runs_of(self.run))

    def is_array(self) -> bool:
        """Return True if the sweep's runs are jobs, and the one after them has not begun."""
        with suppress(ConfigError):
            record = SweepDir(self.run).record
            return record.state == "running" and record.process.host == ON_SLURM
        return False

    def can_cancel(self) -> bool:
        """Return True if the job waits or is that of a sweep: the core stops runs alone."""
        state = self.state()
        if state is None:
            return self.is_array()
        return state[0] in ("PENDING", "REQUEUED") or not (self.run / "run.json").exists()

    def cancel(self) -> None:
        """Cancel what waits; what runs saves and stops."""
        which = self.ids or [f"--name={self.name}", f"--user={getuser()}"]
        run("scancel", "--state=PENDING", *which)
        run("scancel", "--state=RUNNING", "--batch", "--signal=TERM", *which)
        if self.is_array():
            release_sweep(self.run)


def find(root: Path, name: str) -> Job | None:
    """Return the job of the run of this name, or beginning of a name, under `root`."""
    jobs = [Job(file.parent) for file in root.glob(f"[!.]*/{FOLDER}/*/job.json")]
    exact = [job for job in jobs if job.name == name]
    found = exact or [job for job in jobs if job.name.startswith(name)]
    if len(found) != 1:
        return None
    return found[0]


def submit(line: Line, spec: str) -> Job:
    """Write the script of a run or sweep and submit it; its runs are an array if `array` can.

    Raises ResourceError if SLURM refuses it.
    """
    options = parse(spec)
    job = Job(line.folder.parent / FOLDER / line.folder.name)
    if job.folder.exists() and job.state() is not None:
        raise ConflictError(f"the job {job.id} of the run {job.name} has not ended")
    if job.is_array() and line.search is None:  # its jobs were cancelled by hand
        release_sweep(job.run)
    nodes = int(options.get("nodes") or 1)
    more: list[str] = []
    if nodes > 1 and "trainer.nnodes" not in overridden_keys(line.words):
        more.append(f"trainer.nnodes={nodes}")
    if line.search is not None:
        from rlctl.plugins.console.slurm.array import submit_array, why_one_job

        reason = why_one_job(line.config.sweep)
        if reason is None:
            verb, source, overrides = line.search
            submit_array(job, (verb, source, [*overrides, *more]), options)
            return job
        notice(f"the sweep is one job, which runs its trials on its devices: {reason}")
    order = {"words": [*line.words, *more], "again": line.again, "run": str(job.run)}
    write_order(job, order)
    (job.folder / "id").write_text(send(job, "job.sh", options), encoding="utf-8")
    return job


def write_order(job: Job, order: Mapping[str, Any]) -> None:
    """Write what the job runs."""
    job.folder.mkdir(0o700, parents=True, exist_ok=True)
    text = json.dumps({**order, "python": sys.executable})
    (job.folder / "job.json").write_text(text, encoding="utf-8")
    (job.folder / "id").unlink(missing_ok=True)


def send(job: Job, name: str, options: Mapping[str, str], task: str = "") -> str:
    """Write the script `name` and submit it; return its number. `task` names that of an array."""
    script = job.folder / name
    script.write_text(_script(job, options, task), encoding="utf-8")
    done = run("sbatch", "--parsable", str(script))
    if done.returncode:
        (job.folder / "job.json").unlink()
        if any(text in done.stderr for text in _UNREACHABLE):
            raise _no_answer(done.stderr)
        raise ResourceError(
            f"sbatch refused the job: {done.stderr.strip()}",
            where=str(script),
            hint=f"change {OPTION}",
        )
    return done.stdout.strip().split(";")[0]


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


def check(options: Mapping[str, str]) -> None:
    """Let sbatch check names and values of options, for which it needs no controller.

    Raises UsageError for a wrong one, and ResourceError without a cluster.
    """
    try:
        usage = run("sbatch", "--help")
    except ResourceError as error:
        raise ResourceError("there is no SLURM here: sbatch is missing", hint=_HERE) from error
    if usage.returncode:
        message = f"sbatch finds no cluster of SLURM: {_message(usage.stderr)}"
        raise ResourceError(message, hint=f"set SLURM_CONF to its slurm.conf, or {_HERE}")
    for key, value in options.items():
        done = run("sbatch", f"--{key}={value}" if value else f"--{key}", "--help")
        if not done.returncode:
            continue
        message, hint = f"sbatch does not know {key}", "`sbatch --help` lists its options"
        if "unrecognized" in done.stderr:
            hint = did_you_mean(key, {*_NAME.findall(usage.stdout)} - _OURS) or hint
        elif "script is empty" in done.stderr:  # the option took `--help` as its value
            message = f"{key} needs a value"
        else:
            message = f"sbatch refuses {key}={value}: {_message(done.stderr)}"
        raise UsageError(message, where=OPTION, hint=hint)


def follow(job: Job) -> None:
    """Print why the job waits and then its run, until it is over."""
    from rlctl.cli.commands.watch import watch

    while True:
        for reason in job.waiting():
            notice(f"job {job.id}: {reason}")
        if not job.is_active():
            return
        watch(str(job.run))


def _no_answer(errors: str) -> ResourceError:
    message = f"the controller of SLURM does not answer: {_message(errors)}"
    return ResourceError(message, hint="`scontrol ping` shows where slurm.conf says that it is")


def _message(errors: str) -> str:
    """Return the last line of the errors of sbatch, without its name."""
    last = (errors.strip().splitlines() or ["no reason given"])[-1]
    return last.removeprefix("sbatch: ").removeprefix("error: ").removeprefix("fatal: ")


def _script(job: Job, options: Mapping[str, str], task: str) -> str:
    ours = {
        "job-name": job.name,
        "output": str(job.output),
        "open-mode": "append",
        "requeue": "",
        "signal": f"B:USR1@{_lead(options.get('time', ''))}",
        "ntasks-per-node": "1",
    }
    lines = ["#!/bin/bash"]
    for key, value in {**ours, **options}.items():
        lines.append(f"#SBATCH --{key}={shlex.quote(value)}" if value else f"#SBATCH --{key}")
    lines.append("set -eu")
    python = Path(sys.executable)
    if int(options.get("nodes") or 1) > 1:
        lines.append(f"PATH={shlex.quote(str(python.parent))}:$PATH\n{_RAY.rstrip()}")
    command = [str(python), "-P", "-m", "rlctl.plugins.console.slurm.job", str(job.folder)]
    lines.append(f"exec {shlex.join(command)} {task}".rstrip())
    return "\n".join(lines) + "\n"


def _lead(time_limit: str) -> int:
    """Return the seconds before the time limit at which the run saves: at most a quarter of it."""
    if time_limit.isdigit():  # minutes
        time_limit += "m"
    limit = parse_duration(time_limit) if time_limit else None
    if limit is None:
        return _LEAD_S
    return min(_LEAD_S, int(limit.total_seconds() // 4))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM. Raises ResourceError if it is missing or does not answer."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        hint = "use a login node of the cluster"
        raise ResourceError(f"{command[0]} of SLURM is not here", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        raise ResourceError(f"{command[0]} did not answer within {_TIMEOUT_S} s") from error
