"""Validation of supervised fine-tuning on token rows: the loss of held-out rows."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.runtime.base.roles import Roles
from rlctl.runtime.data.loader import PromptSet
from rlctl.runtime.data.readers import to_scored
from rlctl.runtime.training.validation import Validation


@dataclass(frozen=True)
class LossValidator:
    """Mean loss of the learned tokens of `prompts`, `batch_size` rows at a time (None: all)."""

    prompts: PromptSet
    batch_size: int | None

    def run(self, roles: Roles) -> Validation:
        """Run one pass: `val/loss`, without samples."""
        size = self.batch_size or len(self.prompts)
        total = 0.0
        count = 0.0
        for start in range(0, len(self.prompts), size):
            stop = min(start + size, len(self.prompts))
            batch = to_scored(self.prompts.batch(range(start, stop)))
            log_probs = roles.actor.compute_log_probs(batch).log_probs.values.double()
            mask = batch.response_mask.values.double()
            total = total - float((log_probs * mask).sum())
            count = count + float(mask.sum())
        return Validation({"val/loss": total / count}, [])
