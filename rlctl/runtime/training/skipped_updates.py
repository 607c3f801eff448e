"""Updates that workers skip because their gradient is not finite."""

from __future__ import annotations

import torch

from rlctl.errors import RlctlError
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.batch import Scored
from rlctl.runtime.batch.stored import fetched


def record(run: RunDir, step: int, scored: Scored, in_a_row: int, most: int) -> None:
    """Save the batch of a skipped update. Raises RlctlError after `most` such steps in a row."""
    dump = run.attempt / f"non_finite_step_{step:06d}.pt"
    torch.save(fetched(scored), dump)
    run.event("skipped_update", step=step, batch=str(dump))
    if in_a_row >= most:
        raise RlctlError(
            f"the gradient was not finite in {in_a_row} steps in a row, the last being step {step}",
            where=str(dump),
            hint="lower the learning rate, or inspect the batch with torch.load; "
            "trainer.max_skipped_updates sets the limit",
        )
