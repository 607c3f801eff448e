"""Learning-rate schedules: functions of the step, without state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

from rlctl.recipes import schema


@dataclass(frozen=True)
class Schedule:
    """Learning rate with linear warm-up and optional decay.

    It rises from 0 over `num_warmup` steps, then stays constant or falls (cosine or linear) to
    `min_ratio` of the peak at step `num_steps`.
    """

    peak: float
    num_steps: int
    num_warmup: int
    kind: Literal["constant", "cosine", "linear"]
    min_ratio: float

    @classmethod
    def from_config(cls, optim: schema.Optim, num_steps: int) -> Self:
        """Build from an `optim` section.

        `lr_warmup_steps` has precedence over `lr_warmup_steps_ratio`, a share of `num_steps`.
        """
        warmup = (
            optim.lr_warmup_steps
            if optim.lr_warmup_steps > 0
            else int(optim.lr_warmup_steps_ratio * num_steps)
        )
        return cls(optim.lr, num_steps, warmup, optim.lr_scheduler_type, optim.min_lr_ratio)

    def __call__(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 1: peak/num_warmup at the first step."""
        if step <= self.num_warmup:
            return self.peak * step / self.num_warmup
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (step - self.num_warmup) / max(1, self.num_steps - self.num_warmup))
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * falling)
