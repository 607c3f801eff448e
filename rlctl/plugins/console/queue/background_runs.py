"""Runs in the background: entries of the queue that do not wait for free devices."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from rlctl.cli.startup import announce
from rlctl.cli.stderr import notice
from rlctl.errors import UsageError
from rlctl.plugins.console.queue.orders import checked
from rlctl.plugins.console.queue.queue_file import Queue
from rlctl.plugins.console.queue.worker import ensure_worker
from rlctl.runs.events import EVENTS_FILE
from rlctl.terminal import visible

_BEGIN_S = 300.0
_POLL_S = 0.2


def run(context: Any, slurm: str | None) -> None:
    """Start the command of a context: in the background, or with the options `slurm` as a job."""
    for name in ("dry_run", "address"):
        if context.params.get(name):
            option = f"--{name.replace('_', '-')}"
            message = f"--detach and --slurm cannot be combined with {option}"
            raise UsageError(message, hint="leave out one of them")
    if slurm is not None:
        _submit(context, slurm)
        return
    announce("checking the command")
    queue = Queue()
    entry = queue.add(checked(context).order(now=True))
    ensure_worker(queue)
    name = entry.order.name
    log = queue.log(entry)
    began = time.time() - 1
    deadline = time.monotonic() + _BEGIN_S
    while not _has_begun(Path(entry.order.folder), began):
        found = [each for each in queue.entries() if each.id == entry.id]
        if found and found[0].ended:
            sys.stderr.write(visible(log.read_text(encoding="utf-8", errors="replace")))
            raise typer.Exit(found[0].exit_code or (found[0].state != "finished"))
        if time.monotonic() > deadline:
            notice(f"{name} has not begun yet; its output is in {log}")
            return
        time.sleep(_POLL_S)
    notice(f"{name} runs in the background, with its output in {log}")
    notice(f"`rlctl watch {name}` follows it, `rlctl stop {name}` stops it")


def _submit(context: Any, options: str) -> None:
    """Submit the command of a context as a job, and follow it unless `--detach` is given."""
    from rlctl.plugins.console.slurm.sbatch import check, follow, parse, submit

    check(parse(options))
    announce("checking the command")
    job = submit(checked(context, here=False), options)
    notice(f"job {job.id} of SLURM runs {job.name}; its script and output are in {job.folder}")
    notice(f"`rlctl watch {job.name}` follows it, `rlctl stop {job.name}` stops it")
    if not context.params["detach"]:
        follow(job)


def _has_begun(folder: Path, since: float) -> bool:
    """Return True if the run or sweep has written its record."""
    for name in (EVENTS_FILE, "sweep.json"):
        with suppress(OSError):
            if (folder / name).stat().st_mtime >= since:
                return True
    return False
