"""Clip-Cov and KL-Cov, arXiv 2505.22617: treat the few tokens whose log-prob and advantage vary together most; they cost the most entropy.

The covariance of a token is (A − mean A)·(log π − mean log π). The authors' code and verl take the means, and the share of tokens to treat,
over the micro-batch at hand, and so do we. So **these two losses depend on how a mini-batch is cut** into ranks and micro-batches, unlike
all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.policy_losses.base import (
    ClipParams,
    PolicyTokens,
    clipped,
    policy_loss,
    token_means,
)
from rlctl.runtime.ops import masked_mean
from rlctl.tracking.metrics import Metrics


def _covariance(tokens: PolicyTokens) -> Tensor:
    log_probs = tokens.log_probs.detach()
    return (tokens.advantages - masked_mean(tokens.advantages, tokens.mask)) * (
        log_probs - masked_mean(log_probs, tokens.mask)
    )


def _num_treated(tokens: PolicyTokens, ratio: float) -> int:
    return max(1, int(ratio * float(tokens.mask.sum())))


@policy_loss("clip_cov")
def clip_cov(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
    """PPO's clip without dual clip; besides, `clip_cov_ratio` of the tokens (at least one) get no gradient. arXiv 2505.22617.

    They are drawn, by torch's global generator, from the unclipped ones with a covariance strictly between `cov_low` and `cov_high`.
    `actor/pg_clipfrac` is the share of drawn tokens.
    """
    d = tokens.log_ratio
    bound, is_clipped = clipped(d.exp(), tokens, params)
    covariance = _covariance(tokens)
    eligible = (
        (covariance > params.cov_low)
        & (covariance < params.cov_high)
        & ~is_clipped
        & (tokens.mask > 0)
    )
    candidates = eligible.nonzero().squeeze(-1)
    drawn = candidates[
        torch.randperm(len(candidates), device=candidates.device)[
            : _num_treated(tokens, params.clip_cov_ratio)
        ]
    ]
    kept = torch.ones_like(bound).index_fill(0, drawn, 0.0)
    return bound * kept, token_means(
        tokens.mask, {"actor/pg_clipfrac": kept == 0, "actor/ppo_kl": -d}
    )


@policy_loss("kl_cov")
def kl_cov(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
    """−Aρ without a clip; the `kl_cov_ratio` of the tokens (at least one) with the largest covariance pay `kl_coef`·|d|.

    arXiv 2505.22617.
    """
    d = tokens.log_ratio
    covariance = _covariance(tokens).masked_fill(tokens.mask == 0, -torch.inf)
    top = covariance.topk(min(_num_treated(tokens, params.kl_cov_ratio), len(covariance))).indices
    penalty = torch.zeros_like(d).index_fill(0, top, params.kl_coef) * d.abs()
    return -tokens.advantages * d.exp() + penalty, token_means(tokens.mask, {"actor/ppo_kl": -d})
