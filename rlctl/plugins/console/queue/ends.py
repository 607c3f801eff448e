"""End of an entry of the queue: its state, and why it failed."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlctl.errors import REQUESTED_STOPS, RlctlError
from rlctl.plugins.console.queue.queue_file import Entry
from rlctl.redaction import redact
from rlctl.runs.record import now
from rlctl.runs.run import ACTIVE, read_run
from rlctl.sweeps.sweep_record import SweepDir

_MOST_RESTARTS = 3
_TAIL = 1 << 16  # bytes of the output that are searched for an error


def end_of(entry: Entry, log: Path, child: subprocess.Popen[bytes] | None) -> dict[str, Any] | None:
    """Return the fields that note the end of a running entry; None while it runs.

    `child` is its process if this process has started it. An entry that ended with its machine
    waits again: its run is resumed. Only the exit code differs after `rlctl stop`, which
    only the process has that started the entry, and which ends with the machine.
    """
    process = entry.process
    folder = Path(entry.order.folder)
    code = child and child.returncode
    if process is None or (code is None and (child or process.alive(folder) is not False)):
        return None
    state, reason = _recorded(entry, folder)
    if state in ACTIVE:  # another process has resumed the run
        return None
    went_down = code is None and not process.is_visible and state not in ("finished", "failed")
    if went_down and entry.restarts < _MOST_RESTARTS:
        return {"state": "waiting", "process": None, "used": (), "restarts": entry.restarts + 1}
    if code is not None:
        if code < 0:
            code = 128 - code
        if code or state != "stopped":  # a time limit stops a run with code 0
            state = _state_of(code)
    elif state not in ("finished", "failed", "stopped"):
        state = "failed"
        reason = reason or _last_error(log) or "its process was killed"
    if state == "failed" and not reason:
        reason = _last_error(log) or f"exit code {code}"
    return {"state": state, "exit_code": code, "ended": now(), "reason": redact(reason)}


def _state_of(code: int) -> str:
    if code in REQUESTED_STOPS:
        return "stopped"
    return "failed" if code else "finished"


def _recorded(entry: Entry, folder: Path) -> tuple[str, str]:
    """Return state and error that the run or sweep recorded since the entry began."""
    began = datetime.fromisoformat(entry.began or now()).timestamp()
    with suppress(OSError, RlctlError):
        if (folder / "sweep.json").exists():
            return SweepDir(folder).state, ""
        if (folder / "run.json").stat().st_mtime >= began - 1:  # else of an earlier attempt
            run = read_run(folder)
            failure = (run.record and run.record.failure) or {}
            return run.state, failure.get("message") or ""
    return "", ""


def _last_error(log: Path) -> str:
    """Return the last error in the output of an entry."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        lines = file.read().decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("error: ")), "")
    return ""
