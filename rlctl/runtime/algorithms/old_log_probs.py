"""The policy that an update compares with: log-probs before the step, and rollout correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Needs, cut
from rlctl.runtime.algorithms.correction import Correction
from rlctl.runtime.algorithms.mismatch import check_update, sampled_log_probs
from rlctl.runtime.algorithms.policy_losses.base import TokenLoss
from rlctl.runtime.algorithms.sampled_tokens import SampledTokens
from rlctl.runtime.algorithms.stats import entropy_metric
from rlctl.runtime.base.batch import Batch, Experience, LogProbs, Ragged, Scored
from rlctl.runtime.base.metrics import Metrics
from rlctl.runtime.base.ops import PolicyOutputs
from rlctl.runtime.base.roles import Actor, Roles, Total


class PolicyUpdate(Protocol):
    """Way in which the updates of a step get the policy that they compare with."""

    def compute_old_log_probs(self, roles: Roles, scored: Scored) -> tuple[LogProbs | None, Scored]:
        """Return the log-probs before the step, and the batch that they belong to.

        None: each update computes those of its rows.
        """
        ...

    def update(
        self, roles: Roles, experience: Experience, cuts: Sequence[Tensor], lr: float
    ) -> list[Metrics]:
        """Update the actor with the mini-batches of rows `cuts`, (N,) int64 each."""
        ...


@dataclass(frozen=True)
class PassBefore(PolicyUpdate):
    """Updates after a pass over all rows; the experts that it records are replayed."""

    correction: Correction

    def compute_old_log_probs(self, roles: Roles, scored: Scored) -> tuple[LogProbs | None, Scored]:
        old = sampled_log_probs(roles, scored)
        if old.routing is not None:
            scored = replace(scored, routing=old.routing)
        return old, scored

    def update(
        self, roles: Roles, experience: Experience, cuts: Sequence[Tensor], lr: float
    ) -> list[Metrics]:
        return [roles.actor.update(batch, lr) for batch in cut(experience, cuts)]


class Bypass(PassBefore):
    """Updates that compare with the engine's log-probs, without a pass."""

    def compute_old_log_probs(
        self,
        roles: Roles,  # noqa: ARG002  # the other kinds need it
        scored: Scored,
    ) -> tuple[LogProbs | None, Scored]:
        return LogProbs(scored.rollout_log_probs, None), scored

    def update(
        self, roles: Roles, experience: Experience, cuts: Sequence[Tensor], lr: float
    ) -> list[Metrics]:
        metrics: list[Metrics] = []
        for number, batch in enumerate(cut(experience, cuts)):
            if self.correction.needs_mini_batch:
                now = sampled_log_probs(roles, batch, has_updated=number > 0)
                batch, found = corrected(batch, now, self.correction)
                metrics.append(found)
            metrics.append(roles.actor.update(batch, lr))
        return metrics


class OwnPass(PassBefore):
    """Updates of which the first computes the old log-probs of its rows itself.

    Later epochs need them, too. Other rows have a pass before the first update, because the weights
    are those of the rollouts only until then.
    """

    def compute_old_log_probs(
        self,
        roles: Roles,  # noqa: ARG002  # the other kinds need it
        scored: Scored,
    ) -> tuple[LogProbs | None, Scored]:
        return None, scored

    def update(
        self, roles: Roles, experience: Experience, cuts: Sequence[Tensor], lr: float
    ) -> list[Metrics]:
        actor = roles.actor
        limit = roles.max_probs_diff
        first, *later = cuts
        is_first = torch.zeros(len(experience), dtype=torch.bool)
        is_first[first] = True
        others = (~is_first).nonzero().squeeze(1)
        first_batch = experience.select(first)
        metrics: list[Metrics] = []
        parts: list[Experience] = []
        if len(others):
            batch = experience.select(others)
            old = sampled_log_probs(roles, batch)
            batch, found = _with_old_log_probs(batch, old, actor, self.correction)
            metrics.append(found)
            parts.append(batch)
        if any(bool(is_first[rows].any()) for rows in later):
            old, found = actor.update_with_log_probs(first_batch, lr, limit)
            check_update(roles, first_batch, found, old)
            # The update has reported the metrics of the correction.
            parts.append(_with_old_log_probs(first_batch, old, actor, self.correction)[0])
            others = torch.cat([others, first])
        else:
            found = actor.update(first_batch, lr, limit)
            check_update(roles, first_batch, found)
        metrics.append(found)
        if not later:
            return metrics
        position = torch.empty(len(experience), dtype=torch.int64)
        position[others] = torch.arange(len(others))
        batches = Experience.concat(parts).chunk([position[rows] for rows in later])
        return metrics + [actor.update(batch, lr) for batch in batches]


def choose_update(
    config: schema.Config, needs: Needs, correction: Correction, policy_loss: TokenLoss
) -> PolicyUpdate:
    """Return the way of updates for an estimator with these needs.

    Old log-probs come from the pass of an update unless they are needed before it: for advantages,
    weights of the global batch, the number of tokens that are not rejected, and to be replayed.
    """
    if correction.bypass:
        return Bypass(correction)
    algorithm = config.algorithm
    actor = config.actor_rollout_ref.actor
    before = algorithm.use_kl_in_reward or algorithm.use_pf_ppo
    before |= Needs.SUM_PI_SQUARED in needs or correction.needs_batch
    before |= actor.router_replay.mode == "R2"
    before |= correction.rejects and policy_loss.aggregates_apart(actor)
    return PassBefore(correction) if before else OwnPass(correction)


def _with_old_log_probs(
    batch: Experience, old: LogProbs, actor: Actor, correction: Correction
) -> tuple[Experience, Metrics]:
    """Return `batch` with the log-probs `old`, mask and weights of the correction, and metrics."""
    with_old = batch.grow(_WithEntropy, entropy=old.entropy)
    with_old = replace(with_old, old_log_probs=old.log_probs)
    if with_old.is_stored and not correction.batch_normalize:
        changed, metrics = actor.map_groups(with_old, partial(_correct, correction))
    else:
        changed, metrics = _correct(correction, with_old)
    return replace(batch, old_log_probs=old.log_probs, **vars(changed)), metrics


@dataclass(frozen=True, eq=False)
class _WithEntropy(Experience):
    """Experience with the entropies of the policy."""

    entropy: Ragged | None = None


@dataclass(frozen=True, eq=False)
class _Changed(Batch):
    """Fields of `Experience` that rollout correction sets."""

    response_mask: Ragged
    is_weights: Ragged | None


def _correct(
    correction: Correction, batch: _WithEntropy, _: Total | None = None
) -> tuple[_Changed, Metrics]:
    assert batch.old_log_probs is not None
    found, metrics = corrected(batch, LogProbs(batch.old_log_probs, None), correction)
    metrics |= entropy_metric(found, batch.entropy)
    return _Changed(found.response_mask, found.is_weights), metrics


def corrected(
    batch: Experience, now: LogProbs, correction: Correction
) -> tuple[Experience, Metrics]:
    """Return `batch` with the mask and weights of rollout correction, and metrics.

    `now` has the log-probs of the policy that the engine is compared with.
    """
    tokens = SampledTokens.from_rollouts(batch, now.log_probs.values)
    kept, weights, metrics = correction(tokens)
    mask = batch.response_mask
    is_weights = mask.like(weights) if weights is not None else None
    return replace(batch, response_mask=mask.like(kept), is_weights=is_weights), metrics


def compared_with(
    batch: Experience, outputs: PolicyOutputs, correction: Correction
) -> tuple[Tensor, Tensor, Tensor | None, Metrics]:
    """Return old log-probs, mask and weights (or None) of a micro-batch, (T,) each, and metrics.

    Without old log-probs of the batch, they are those of `outputs`, without a graph.
    """
    mask = batch.response_mask.values
    weights = None if batch.is_weights is None else batch.is_weights.values
    now = old = outputs.log_probs.detach()
    metrics = Metrics()
    if batch.old_log_probs is not None:
        old = batch.old_log_probs.values
    if batch.old_log_probs is None or correction.in_loss:
        sampled = SampledTokens.from_rollouts(batch, now)
        mask, weights, metrics = correction(sampled)
        if correction.interpolate:
            from rlctl.runtime.algorithms.proximal import proximal

            old = proximal(sampled)
    if batch.old_log_probs is None and outputs.entropy is not None:
        metrics |= entropy_metric(batch, outputs.entropy.detach())
    return old, mask, weights, metrics
