"""Advantages of a batch whose per-token values are on the workers: each computes some groups."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from rlctl.runtime.algorithms.importance_weights import SampledTokens, probs_diff
from rlctl.runtime.algorithms.token_rewards import KL_PENALTY
from rlctl.runtime.batch import Batch, Experience, LogProbs, Ragged, Rollouts, Scored
from rlctl.runtime.batch.stored import is_stored
from rlctl.runtime.roles import Actor, Total
from rlctl.tracking.metrics import Mean, Metric, Metrics

if TYPE_CHECKING:
    from rlctl.runtime.algorithms.ppo import PPO

_DIFF = "diff"


@dataclass(frozen=True, eq=False)
class _Passes(Scored):
    """Scored rows with the results of the models' passes."""

    old: Ragged | None  # (B rows) float32, as all fields
    entropy: Ragged | None
    sum_pi_squared: Ragged | None
    ref: Ragged | None
    values: Ragged | None


@dataclass(frozen=True, eq=False)
class _Added(Batch):
    """Fields of `Experience` that the workers compute."""

    rewards: Ragged
    advantages: Ragged
    returns: Ragged | None
    response_mask: Ragged
    is_weights: Ragged | None


@dataclass(frozen=True)
class _OnWorkers:
    """Computation of one worker's groups; pickled to the workers in each step."""

    algorithm: PPO

    def __call__(self, batch: _Passes, total: Total) -> tuple[_Added, Metrics]:
        scored = Scored(**{field.name: getattr(batch, field.name) for field in fields(Scored)})
        old = None
        if batch.old is not None:
            old = LogProbs(batch.old, batch.entropy, batch.sum_pi_squared)
        ref = LogProbs(batch.ref, None) if batch.ref is not None else None
        experience, metrics = self.algorithm.compute_advantages(
            scored, old, ref, batch.values, total
        )
        added = {field.name: getattr(experience, field.name) for field in fields(_Added)}
        return _Added(**added), metrics


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
    stored = is_stored(scored) or (old is not None and is_stored(old))
    whole = bool(scored.episodes) or (correction.batch_normalize and not correction.bypass)
    if whole or not stored or not algorithm.estimator.by_group:
        return algorithm.compute_advantages(scored, old, ref, values)
    ref_log_probs = ref.log_probs if ref is not None else None
    old_log_probs = old.log_probs if old is not None else None
    batch = scored.grow(
        _Passes,
        old=old_log_probs,
        entropy=old.entropy if old is not None else None,
        sum_pi_squared=old.sum_pi_squared if old is not None else None,
        ref=ref_log_probs,
        values=values,
    )
    added, metrics = actor.map_groups(batch, _OnWorkers(algorithm))
    if (kl := metrics.get(KL_PENALTY)) is not None:  # a worker has updated a copy
        algorithm.kl.update(kl.value, len(scored))
    computed = {field.name: getattr(added, field.name) for field in fields(added)}
    scored = replace(scored, response_mask=computed.pop("response_mask"))
    return scored.grow(
        Experience,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        values=values,
        **computed,
    ), metrics


@dataclass(frozen=True, eq=False)
class _Compared(Rollouts):
    """Rollouts with the trainer's log-probs."""

    trainer: Ragged


def mean_probs_diff(rollouts: Rollouts, log_probs: LogProbs, actor: Actor) -> float:
    """Return the mean of |π_train − π_rollout| of the unmasked tokens, 0 without any."""
    if not (is_stored(rollouts) or is_stored(log_probs)):
        return _value(_probs_diff(rollouts, log_probs.log_probs))
    columns = {field.name: getattr(rollouts, field.name) for field in fields(Rollouts)}
    metrics = actor.map_groups(_Compared(**columns, trainer=log_probs.log_probs), _compare)
    return _value(metrics[_DIFF])


def _value(diff: Metric) -> float:
    return 0.0 if isinstance(diff, Mean) and not diff.count else diff.value


def _compare(batch: _Compared, _: Total) -> Metrics:
    return {_DIFF: _probs_diff(batch, batch.trainer)}


def _probs_diff(rollouts: Rollouts, log_probs: Ragged) -> Mean:
    diff = probs_diff(SampledTokens.from_rollouts(rollouts, log_probs.values))
    return Mean(float(diff.sum()), len(diff))
