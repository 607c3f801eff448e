"""The point from which a run that has not finished is resumed."""

from __future__ import annotations

from rlctl.monitoring.text import plural
from rlctl.runs.run_dir import RunDir
from rlctl.tracking.summary import read_summary


def resumed_from(run: RunDir) -> str | None:
    """Return the point from which `rlctl resume` continues; None if nothing is lost or left."""
    from rlctl.runtime.checkpoint.checkpoint_store import CheckpointStore

    figures = read_summary(run.path, writes=False).figures
    last, parent = (figures and figures.step) or 0, run.record.parent
    if steps := CheckpointStore(run.path / "checkpoints").steps():
        return f"after step {steps[-1]}"
    if not last:
        return None
    if parent:
        return f"after step {parent['step']} of the run that it was forked from"
    return f"from the beginning: none of the {plural(last, 'step')} is saved"
