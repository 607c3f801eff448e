"""`rlctl watch`, `logs` and `stop` of a run whose SLURM job waits or has not made its folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import typer

from rlctl.cli.options import Json, Root, RunName, RunNames
from rlctl.cli.stderr import notice
from rlctl.runs.store import RunStore
from rlctl.terminal import visible

watch_app = typer.Typer()
logs_app = typer.Typer()
stop_app = typer.Typer()


@watch_app.command(help="")
def watch(run: RunName, root: Root = None) -> bool:
    """Print why the job of a run waits, until the run begins; return False."""
    from rlctl.plugins.console.slurm.sbatch import find

    job = find(RunStore(root).root, run)
    if job is not None and job.state() is not None:
        for reason in job.waiting():
            notice(f"job {job.id}: {reason}")
    return False


@logs_app.command(help="")
def logs(run: RunName, follow: bool = False, root: Root = None) -> bool:
    """Print the output of a job of one process, or without a run yet; else return False."""
    from rlctl.plugins.console.slurm.sbatch import find

    job = find(RunStore(root).root, run)
    if job is None or any(job.run.glob("attempts/latest/*-*.log")):
        return False
    for text in _output(job.output):
        sys.stdout.write(visible(text))
        sys.stdout.flush()
        if text:
            continue
        if not follow or job.state() is None:
            break
        time.sleep(1)
    return True


@stop_app.command(help="")
def stop(runs: RunNames, as_json: Json = False, root: Root = None) -> bool:
    """Cancel jobs that wait, and those of sweeps; return True if all of the runs are such."""
    from rlctl.cli.console import print_json
    from rlctl.plugins.console.slurm.sbatch import find

    jobs = [find(RunStore(root).root, run) for run in runs]
    waiting = [job for job in jobs if job is not None and job.can_cancel()]
    for job in waiting:
        job.cancel()
        if not as_json:
            notice(f"{job.name}: the job {job.id} is cancelled")
    if as_json and len(waiting) == len(runs):
        print_json([{"name": job.name, "state": "cancelled"} for job in waiting])
    return len(waiting) == len(runs)


def _output(file: Path) -> Iterator[str]:
    """Yield new text of a file, and an empty text when there is none; it need not exist yet."""
    from rlctl.runs.logs import Tail

    tail = Tail(file)
    while True:
        yield from (f"{line}\n" for line in tail.lines())
        yield ""
