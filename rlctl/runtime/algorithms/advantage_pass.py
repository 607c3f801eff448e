"""Choice of the place where a step computes its advantages: the controller, or the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.runtime.base.batch import Experience, LogProbs, Ragged, Scored
from rlctl.runtime.base.metrics import Metrics
from rlctl.runtime.base.roles import Actor

if TYPE_CHECKING:
    from rlctl.runtime.algorithms.ppo import PPO


def compute_advantages(
    algorithm: PPO,
    actor: Actor,
    scored: Scored,
    old: LogProbs | None,
    ref: LogProbs | None,
    values: Ragged | None,
) -> tuple[Experience, Metrics]:
    """Compute advantages on the workers if they have the tokens and it is possible.

    Episodes are not divided: workers do not know which rows belong to one.
    """
    correction = algorithm.correction
    stored = scored.is_stored or (old is not None and old.is_stored)
    whole = bool(scored.episodes) or (correction.batch_normalize and not correction.bypass)
    if whole or not stored or not algorithm.estimator.by_group:
        return algorithm.compute_advantages(scored, old, ref, values)
    from rlctl.runtime.algorithms.divided import divide_advantages

    return divide_advantages(algorithm, actor, scored, old, ref, values)
