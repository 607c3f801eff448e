"""Error of a disk without room for checkpoints."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import ResourceError
from rlctl.files import existing_parent
from rlctl.recipes import schema
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE


def refuse(config: schema.Config, root: Path, free: int, need: int, run: Path | None) -> None:
    """Raise ResourceError, unless `run` has finished and no step is left."""
    if run is not None:
        record = RunRecord.read(run / RECORD_FILE)
        steps = config.trainer.total_training_steps
        if record.state == "finished" and (steps or 0) <= (record.total_steps or 0):
            return
    remedy = (
        "free some space, or use a larger disk: trainer.run_dir=DIR, or for checkpoints alone "
        "trainer.default_local_dir=DIR"
    )
    if config.trainer.saves:
        remedy += ", or trainer.save_freq=-1"
    raise ResourceError(
        f"{existing_parent(root)} has {free / 2**20:.0f} MiB free, and the run needs about "
        f"{need / 2**20:.0f} MiB",
        hint=remedy,
    )
