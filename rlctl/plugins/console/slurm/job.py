"""Process of a job on SLURM: starts or resumes a run or sweep, requeues itself at its limit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from rlctl.errors import REQUESTED_STOPS, RlctlError
from rlctl.runs.record import now
from rlctl.runs.run import ACTIVE, read_run
from rlctl.runs.run_dir import RECORD_FILE, SWEEP_VARIABLE, RunDir
from rlctl.sweeps.sweep_record import RECORD_FILE as SWEEP_FILE
from rlctl.sweeps.sweep_record import SweepDir
from rlctl.tracking.jsonl import METRICS_FILE

ON_SLURM = "jobs of SLURM"  # instead of the host of a sweep's process

_POLL_S = 1.0


def main(folder: Path, task: str | None = None) -> int:
    """Run the command in `job.json` of `folder`, or the one of a task; return its exit code.

    SIGUSR1, before the time limit, and SIGTERM, before a preemption, let the run save. After the
    first the job is requeued; SLURM itself requeues a preempted one.
    """
    order = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    script = folder / "job.sh"
    if task is not None:
        script = folder / "tasks.sh"
        order = {**order["tasks"][int(task)], "python": order["python"]}
    run = Path(order["run"])
    begun = _has_begun(run)
    is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if begun and (is_requeued or order.get("is_last")):
        _release(run)
    received: list[int] = []
    words = order["again" if begun and is_requeued else "words"]
    before = _num_steps(run)
    variables = dict(os.environ)
    if "sweep" in order:
        variables[SWEEP_VARIABLE] = order["sweep"]
    with ExitStack() as stack:
        log = stack.enter_context(Path(order["log"]).open("ab")) if "log" in order else None
        process = subprocess.Popen(
            [order["python"], "-P", "-m", "rlctl", *words],
            stdout=log,
            stderr=log,
            env=variables,
        )

    def forward(number: int, _frame: FrameType | None) -> None:
        if not received:  # a second signal would interrupt the saving
            process.send_signal(signal.SIGTERM)
        received.append(number)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, forward)
    code = process.poll()
    while code is None:
        _keep_script(script, run)
        time.sleep(_POLL_S)
        code = process.poll()
    _keep_script(script, run)  # the run may have begun after the last poll
    if code < 0:
        code = 128 - code
    if received[:1] != [signal.SIGUSR1] or code not in REQUESTED_STOPS:
        return code
    if _num_steps(run) <= before:
        print("error: no step fits into the time limit, so the job is not requeued", flush=True)
        return code
    print("the run is saved before the time limit; the job is requeued", flush=True)
    return subprocess.run(
        ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False
    ).returncode


def runs_of(path: Path) -> list[Path]:
    """Return the folder of a run that has begun, or those of the runs of a sweep."""
    if not (path / SWEEP_FILE).exists():
        return [path] if (path / RECORD_FILE).exists() else []
    name = re.compile(rf"{re.escape(path.name)}-\d{{3,}}(-seed\d+)?")
    records = path.parent.glob(f"[!.]*/{RECORD_FILE}")
    return [record.parent for record in records if name.fullmatch(record.parent.name)]


def release_sweep(path: Path) -> None:
    """Record that a sweep ended whose jobs have ended."""
    sweep = SweepDir(path)
    if sweep.record.state == "running":
        sweep.finish("stopped", 143)


def _has_begun(path: Path) -> bool:
    return (path / RECORD_FILE).exists() or (path / SWEEP_FILE).exists()


def _keep_script(script: Path, run: Path) -> None:
    """Copy the job's script into the folder of its run, once there is one."""
    if _has_begun(run) and not (run / "slurm.sh").exists():
        with suppress(OSError):
            shutil.copy(script, run / "slurm.sh")


def _release(path: Path) -> None:
    """Record that the last attempt ended: its node is not this one, and the job has left it."""
    for folder in runs_of(path):
        with suppress(RlctlError):
            if read_run(folder).state in ACTIVE:
                RunDir(folder).update(state="stopped", exit_code=143, ended=now())
    if (path / SWEEP_FILE).exists():
        release_sweep(path)


def _num_steps(path: Path) -> int:
    """Return the number of steps that the run, or all of a sweep, have finished."""
    files = [folder / METRICS_FILE for folder in runs_of(path)]
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
