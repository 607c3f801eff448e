"""Clip-Cov and KL-Cov, arXiv 2505.22617: special treatment of tokens that reduce the entropy most.

Those are the tokens whose log-prob and advantage have the largest covariance,
(A − mean A)·(log π − mean log π). As in verl and in the authors' code, the means and the share of
treated tokens refer to the micro-batch. So **these two losses depend on how a mini-batch is split**
into ranks and micro-batches, unlike all others.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from rlctl.plugins import Params
from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    clipped,
    policy_loss,
    token_means,
)
from rlctl.runtime.base.metrics import Metrics
from rlctl.runtime.base.ops import masked_mean


class ClipCovParams(Params):
    """Selection of the tokens that get no gradient."""

    clip_cov_ratio: float = Field(
        default=0.0002, gt=0, le=1, description="share of tokens that get no gradient"
    )
    clip_cov_lb: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="lower bound of the covariance of tokens that may be drawn",
    )
    clip_cov_ub: float = Field(
        default=5.0,
        allow_inf_nan=False,
        description="upper bound of the covariance of tokens that may be drawn",
    )


class KlCovParams(Params):
    """Selection of the tokens that get a penalty, and its weight."""

    kl_cov_ratio: float = Field(
        default=0.0002, gt=0, le=1, description="share of tokens that get a KL penalty"
    )
    ppo_kl_coef: float = Field(
        default=0.1, ge=0, allow_inf_nan=False, description="weight of that penalty"
    )


def _covariance(tokens: PolicyTokens) -> Tensor:
    """Return (A − mean A)·(log π − mean log π) of each token: (T,), without a graph."""
    log_probs = tokens.log_probs.detach()
    return (tokens.advantages - masked_mean(tokens.advantages, tokens.mask)) * (
        log_probs - masked_mean(log_probs, tokens.mask)
    )


def _num_treated(tokens: PolicyTokens, ratio: float) -> int:
    """Return `ratio` of the number of unmasked tokens, at least 1."""
    return max(1, int(ratio * float(tokens.mask.sum())))


@policy_loss(params=ClipCovParams, uses=("low", "high"))
def clip_cov(
    tokens: PolicyTokens, clip: ClipRange, params: ClipCovParams
) -> tuple[Tensor, Metrics]:
    """Return PPO's clipped loss without dual clip, 0 on a few drawn tokens: (T,).

    `clip_cov_ratio` of the tokens, at least one, are drawn by torch's global generator from the
    unclipped tokens with a covariance strictly between `clip_cov_lb` and `clip_cov_ub`.
    `actor/pg_clipfrac` is the share of drawn tokens.
    """
    d = tokens.log_ratio
    bound, is_clipped = clipped(d.exp(), tokens, clip)
    covariance = _covariance(tokens)
    in_range = (covariance > params.clip_cov_lb) & (covariance < params.clip_cov_ub)
    candidates = (in_range & ~is_clipped & (tokens.mask > 0)).nonzero().squeeze(-1)
    order = torch.randperm(len(candidates), device=candidates.device)
    drawn = candidates[order[: _num_treated(tokens, params.clip_cov_ratio)]]
    kept = torch.ones_like(bound).index_fill(0, drawn, 0.0)
    metrics = {"actor/pg_clipfrac": kept == 0, "actor/ppo_kl": -d}
    return bound * kept, token_means(tokens.mask, metrics)


@policy_loss(params=KlCovParams, uses=())
def kl_cov(tokens: PolicyTokens, clip: ClipRange, params: KlCovParams) -> tuple[Tensor, Metrics]:
    """Return −Aρ without a clip, plus `ppo_kl_coef`·|d| on a few tokens: (T,).

    These are `kl_cov_ratio` of the tokens, at least one: those with the largest covariance.
    """
    d = tokens.log_ratio
    covariance = _covariance(tokens).masked_fill(tokens.mask == 0, -torch.inf)
    top = covariance.topk(min(_num_treated(tokens, params.kl_cov_ratio), len(covariance))).indices
    penalty = torch.zeros_like(d).index_fill(0, top, params.ppo_kl_coef) * d.abs()
    return -tokens.advantages * d.exp() + penalty, token_means(tokens.mask, {"actor/ppo_kl": -d})
