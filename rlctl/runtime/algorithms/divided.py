"""Advantages of a batch whose per-token values are on the workers: each computes some groups."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from rlctl.runtime.algorithms.mismatch import sum_of_probs_diff
from rlctl.runtime.algorithms.token_rewards import KL_PENALTY
from rlctl.runtime.base.batch import Batch, Experience, LogProbs, Ragged, Rollouts, Scored
from rlctl.runtime.base.metrics import Metric, Metrics
from rlctl.runtime.base.roles import Actor, Total

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


def divide_advantages(
    algorithm: PPO,
    actor: Actor,
    scored: Scored,
    old: LogProbs | None,
    ref: LogProbs | None,
    values: Ragged | None,
) -> tuple[Experience, Metrics]:
    """Compute advantages on the workers, each those of some groups."""
    ref_log_probs = None if ref is None else ref.log_probs
    old_log_probs = entropy = squares = None
    if old is not None:
        old_log_probs = old.log_probs
        entropy = old.entropy
        squares = old.sum_pi_squared
    batch = scored.grow(
        _Passes,
        old=old_log_probs,
        entropy=entropy,
        sum_pi_squared=squares,
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


def divided_probs_diff(rollouts: Rollouts, log_probs: LogProbs, actor: Actor) -> Metric:
    """Return the `sum_of_probs_diff` of rows whose tokens are on the workers."""
    columns = {field.name: getattr(rollouts, field.name) for field in fields(Rollouts)}
    metrics = actor.map_groups(_Compared(**columns, trainer=log_probs.log_probs), _compare)
    return metrics[_DIFF]


def _compare(batch: _Compared, _: Total) -> Metrics:
    return {_DIFF: sum_of_probs_diff(batch, batch.trainer)}
