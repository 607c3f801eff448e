"""Random failures of a tracker's server, and what a run sends meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from rlctl.tracking.tracker import Sample

FAULTS = ("401", "500", "hang", "closed", "slow")
ENDS = ("finished", "finished", "finished", "killed", "resumed")
NUM_STEPS = 6


@dataclass(frozen=True)
class Case:
    """Fault of one run: after how many requests, for how many, and how the attempt ends."""

    seed: int
    logger: str
    fault: str
    after: int
    length: int
    end: str

    @classmethod
    def draw(cls, seed: int) -> Case:
        """Draw a case; seeds that follow each other alternate loggers and faults."""
        rng = random.Random(seed)
        logger, fault = ("wandb", "swanlab")[seed % 2], FAULTS[seed // 2 % len(FAULTS)]
        length = rng.choice((1, 4, 10**6, 10**6))
        return cls(seed, logger, fault, rng.randrange(12), length, rng.choice(ENDS))


def samples(step: int) -> list[Sample]:
    """Return the samples of a step: two, of which both are shown."""
    shown = Sample("1 + 1", f"two at {step}", "2", 1.0, {"acc": 1.0}, 4, "stop", "sums")
    return [shown, replace(shown, response=f"three at {step}", score=0.0)]


def row(step: int) -> dict[str, float]:
    """Return the metrics of a step; one of them is not there at each step."""
    validated = {"val-core/sums/acc/mean@1": 1 / step} if step % 2 == 0 else {}
    return {"critic/score/mean": step / 7, "actor/lr": 0.1, **validated}
