"""Learning-rate schedules: functions of the number of updates, without state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

from rlctl.recipes import schema


@dataclass(frozen=True)
class Schedule:
    """Learning rate with linear warm-up and optional decay.

    It rises from 0 over `num_warmup` updates, then stays constant or falls (cosine or linear)
    towards `min_ratio` of the peak, which it would reach after the last of `num_updates` updates.
    The values are those of transformers' `get_*_schedule_with_warmup` at the same count.
    """

    peak: float
    num_updates: int
    num_warmup: int
    kind: Literal["constant", "cosine", "linear"]
    min_ratio: float
    num_cycles: float = 0.5

    @classmethod
    def from_config(cls, optim: schema.Optim, num_updates: int) -> Self:
        """Build from an `optim` section, for a role that is updated in `num_updates` steps.

        `lr_warmup_steps` has precedence over `lr_warmup_steps_ratio`, a share of `num_updates`.
        """
        warmup = optim.lr_warmup_steps
        if warmup <= 0:
            warmup = int(optim.lr_warmup_steps_ratio * num_updates)
        kind = optim.lr_scheduler_type
        cycles = optim.num_cycles
        return cls(optim.lr, num_updates, warmup, kind, optim.min_lr_ratio, cycles)

    def __call__(self, count: int) -> float:
        """Return the learning rate of the update that `count` others precede."""
        if count < self.num_warmup:
            return self.peak * count / self.num_warmup
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (count - self.num_warmup) / max(1, self.num_updates - self.num_warmup))
        angle = 2 * math.pi * self.num_cycles * done
        share = 0.5 * (1 + math.cos(angle)) if self.kind == "cosine" else 1 - done
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * share)
