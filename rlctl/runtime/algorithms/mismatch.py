"""Guard against an engine with other weights than the trainer, or with other probabilities.

Before the first update of a step, the policy is the one that generated the responses. Where the
mean of |π_engine − π_trainer| over their tokens exceeds `Roles.max_probs_diff`, nothing is learned.
"""

from __future__ import annotations

from rlctl.runtime.algorithms.sampled_tokens import PROBS_DIFF, SampledTokens, probs_diff
from rlctl.runtime.base.batch import LogProbs, Ragged, Rollouts
from rlctl.runtime.base.metrics import Mean, Metrics
from rlctl.runtime.base.roles import REFUSED, Actor, Roles


class RolloutMismatch(Exception):
    """Engine and trainer differ by `value`, more than `limit`, on the tokens of `batch`."""

    def __init__(self, value: float, limit: float, batch: Rollouts, log_probs: LogProbs) -> None:
        super().__init__(f"{PROBS_DIFF} is {value:.3g}, above {limit:g}")
        self.value = value
        self.limit = limit
        self.batch = batch
        self.log_probs = log_probs


def sampled_log_probs(roles: Roles, batch: Rollouts, has_updated: bool = False) -> LogProbs:
    """Return the actor's log-probs of responses that the run's engine has generated.

    Raises RolloutMismatch, also where the difference is NaN. A policy that is not the one that
    generated them (`has_updated`) is not compared.
    """
    log_probs = roles.actor.compute_log_probs(batch)
    limit = roles.max_probs_diff
    if limit is not None and not has_updated:
        value = _mean_probs_diff(batch, log_probs, roles.actor)
        if not value <= limit:
            raise RolloutMismatch(value, limit, batch, log_probs)
    return log_probs


def _mean_probs_diff(rollouts: Rollouts, log_probs: LogProbs, actor: Actor) -> float:
    """Return the mean of |π_train − π_rollout| of the unmasked tokens, 0 without any."""
    if rollouts.is_stored or log_probs.is_stored:
        from rlctl.runtime.algorithms.divided import divided_probs_diff

        diff = divided_probs_diff(rollouts, log_probs, actor)
    else:
        diff = sum_of_probs_diff(rollouts, log_probs.log_probs)
    return 0.0 if isinstance(diff, Mean) and not diff.count else diff.value


def sum_of_probs_diff(rollouts: Rollouts, log_probs: Ragged) -> Mean:
    """Return the sum of |π_train − π_rollout| of the unmasked tokens, and their number."""
    diff = probs_diff(SampledTokens.from_rollouts(rollouts, log_probs.values))
    return Mean(float(diff.sum()), len(diff))


def check_update(
    roles: Roles, batch: Rollouts, metrics: Metrics, log_probs: LogProbs | None = None
) -> None:
    """Raise RolloutMismatch for the metrics of an update that was refused: see `Actor.update`."""
    if REFUSED in metrics:
        assert roles.max_probs_diff is not None, "an update without a bound is not refused"
        log_probs = log_probs or roles.actor.compute_log_probs(batch)
        raise RolloutMismatch(metrics[PROBS_DIFF].value, roles.max_probs_diff, batch, log_probs)
