"""Check that no process drives a run."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import ConflictError
from rlctl.runs.record import RunRecord


def check_idle(path: Path, record: RunRecord, force: bool = False) -> None:
    """Raise ConflictError if the driver is running or, without `force`, may run elsewhere."""
    process = record.process
    alive = process.alive(path) if record.state in ("starting", "running") else False
    if alive or (alive is None and not force):
        status = "is running" if alive else "is recorded as running"
        hint = (
            "`rlctl watch` follows it"
            if alive
            else "make sure that the process has exited, then use --force"
        )
        raise ConflictError(
            f"{record.name!r} {status}: process {process.pid} on {process.host}",
            where=str(path),
            hint=hint,
        )
