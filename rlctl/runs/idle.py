"""Check that no process drives a run."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import ConflictError
from rlctl.runs.record import RunRecord


def check_idle(path: Path, record: RunRecord, force: bool = False) -> None:
    """Raise ConflictError if the driver is running or, without `force`, may run elsewhere."""
    process = record.process
    if record.state not in ("starting", "running"):
        return
    alive = process.alive(path)
    if alive or (alive is None and not force):
        status = "is recorded as running"
        hint = "make sure that the process has exited, then use --force"
        if alive:
            status = "is running"
            hint = "`rlctl watch` follows it"
        raise ConflictError(
            f"{record.name!r} {status}: process {process.pid} on {process.host}",
            where=str(path),
            hint=hint,
        )
