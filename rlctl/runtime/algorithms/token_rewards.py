"""Token rewards: the score at the last token, the KL penalty and the overlong penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.recipes import schema
from rlctl.runtime.algorithms.kl import KLController, KLEstimator
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.base.metrics import Mean, Metrics

KL_PENALTY = "actor/reward_kl_penalty"  # metric: mean over rows


def score_at_end(
    scores: Tensor, response_ids: Ragged, step_rewards: Ragged | None = None
) -> Ragged:
    """Return rewards (T,) with each row's score at its last token; `scores`: (B,).

    All else is 0, but for `step_rewards` (T,) of the turns of episodes, which are part of the
    score. The score of a row without tokens is dropped.
    """
    rewards = torch.zeros(len(response_ids.values))
    if step_rewards is not None:
        rewards = rewards + step_rewards.values
        scores = scores - step_rewards.sums()
    has_tokens = response_ids.lengths > 0
    rewards[response_ids.offsets[1:][has_tokens] - 1] += scores[has_tokens].float()
    return response_ids.like(rewards)


def penalise_kl(
    rewards: Ragged,
    log_probs: Ragged,
    ref_log_probs: Ragged,
    mask: Ragged,
    estimator: KLEstimator,
    kl: KLController,
) -> tuple[Ragged, Metrics]:
    """Return r_t − β·k_t·m_t, (T,), and metrics. arXiv 1909.08593, equation 2, per token.

    Afterwards β is updated with the KL of the batch: the mean over rows of the mean over tokens.
    """
    penalty = estimator(log_probs.values - ref_log_probs.values) * mask.values  # (T,)
    per_row = mask.like(penalty).sums() / (mask.sums() + 1e-8)  # (B,)
    coefficient = kl.coef
    kl.update(float(per_row.mean()), len(per_row))
    metrics: Metrics = {
        KL_PENALTY: Mean(float(per_row.sum()), len(per_row)),
        "actor/reward_kl_penalty_coeff": Mean(coefficient),
    }
    return rewards.like(rewards.values - coefficient * penalty), metrics


def overlong_penalty(
    lengths: Tensor, max_response_length: int, buffer: schema.OverlongBuffer
) -> Tensor:
    """Return DAPO's soft overlong punishment for responses of `lengths` (B,): (B,).

    arXiv 2503.14476, equation 13: 0 up to max_response_length − buffer.len tokens, then linear down
    to −penalty_factor. 0 unless it is enabled.
    """
    if not buffer.enable:
        return torch.zeros(len(lengths))
    exceeding = lengths - (max_response_length - buffer.len)
    return torch.clamp(-exceeding / buffer.len * buffer.penalty_factor, max=0.0)
