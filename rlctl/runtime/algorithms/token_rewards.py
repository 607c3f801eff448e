"""From one score an answer to a reward a token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.recipes import schema
from rlctl.runtime.algorithms.kl_controllers import KLController
from rlctl.runtime.algorithms.kl_estimators import KLEstimator
from rlctl.runtime.batch import Ragged
from rlctl.tracking.metrics import Mean, Metrics


def score_at_end(scores: Tensor, response_ids: Ragged) -> Ragged:
    """The score of each row (B,) at its last response token, 0 elsewhere. A row without tokens has nowhere to put it."""
    rewards = torch.zeros(len(response_ids.values))
    answered = response_ids.lengths > 0
    rewards[response_ids.offsets[1:][answered] - 1] = scores[answered].float()
    return response_ids.like(rewards)


def penalise_kl(
    rewards: Ragged,
    log_probs: Ragged,
    ref_log_probs: Ragged,
    mask: Ragged,
    estimator: KLEstimator,
    kl: KLController,
) -> tuple[Ragged, Metrics]:
    """r_t − β·k_t·m_t (arXiv 1909.08593, eq. 2, a token at a time). β is used first and adapted afterwards.

    The KL that β is adapted to is the mean over rows of the mean over the row's tokens.
    """
    penalty = estimator(log_probs.values - ref_log_probs.values) * mask.values  # (T,)
    per_row = mask.like(penalty).sums() / (mask.sums() + 1e-8)  # (B,)
    coefficient = kl.coef
    kl.update(float(per_row.mean()), len(per_row))
    metrics: Metrics = {
        "actor/reward_kl_penalty": Mean(float(per_row.sum()), len(per_row)),
        "actor/reward_kl_penalty_coeff": Mean(coefficient),
    }
    return rewards.like(rewards.values - coefficient * penalty), metrics


def overlong_penalty(
    lengths: Tensor, max_response_length: int, buffer: schema.OverlongBuffer
) -> Tensor:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13): 0 up to max − buffer tokens, then linear down to −penalty_factor. (B,)"""
    exceeding = lengths - (max_response_length - buffer.len)
    return torch.clamp(-exceeding / buffer.len * buffer.penalty_factor, max=0.0)
