"""Process of a run's job on SLURM: starts or resumes the run, and requeues the job at its limit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from rlctl.errors import REQUESTED_STOPS, RlctlError
from rlctl.runs.record import now
from rlctl.runs.run import ACTIVE, read_run
from rlctl.runs.run_dir import RECORD_FILE, RunDir
from rlctl.tracking.jsonl import METRICS_FILE

_POLL_S = 1.0


def main(folder: Path) -> int:
    """Run the command in `job.json` of `folder`; return its exit code.

    SIGUSR1, before the time limit, and SIGTERM, before a preemption, let the run save. After the
    first the job is requeued; SLURM itself requeues a preempted one.
    """
    order = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    run = Path(order["run"])
    begun = (run / RECORD_FILE).exists()
    is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if begun and is_requeued:
        _release(run)
    received: list[int] = []
    words = order["again" if begun and is_requeued else "words"]
    before = _num_steps(run)
    process = subprocess.Popen([order["python"], "-P", "-m", "rlctl", *words])

    def forward(number: int, _frame: FrameType | None) -> None:
        if not received:  # a second signal would interrupt the saving
            process.send_signal(signal.SIGTERM)
        received.append(number)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, forward)
    while process.poll() is None:
        if (run / RECORD_FILE).exists() and not (run / "slurm.sh").exists():
            with suppress(OSError):
                shutil.copy(folder / "job.sh", run / "slurm.sh")
        time.sleep(_POLL_S)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if received[:1] != [signal.SIGUSR1] or code not in REQUESTED_STOPS:
        return code
    if _num_steps(run) <= before:
        print("error: no step fits into the time limit, so the job is not requeued", flush=True)
        return code
    print("the run is saved before the time limit; the job is requeued", flush=True)
    return subprocess.run(
        ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False
    ).returncode


def _release(run: Path) -> None:
    """Record that the last attempt ended: its node is not this one, and the job has left it."""
    with suppress(RlctlError):
        if read_run(run).state in ACTIVE:
            RunDir(run).update(state="stopped", exit_code=143, ended=now())


def _num_steps(run: Path) -> int:
    with suppress(OSError):
        return (run / METRICS_FILE).read_bytes().count(b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
