"""Losses of the ratio of the two policies: clipped, gated or weighted, and the policy gradient.

DPPO, arXiv 2602.04879, bounds the divergence of the two policies instead: a rare token may change
its ratio a lot and its probability hardly; PPO clips it, DPPO does not. The divergence is that of
the two distributions "this token or another". For DPPO `low` and `high` of `ClipRange` are
divergences, and `c` truncates the ratio (the paper advises 20).
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
from rlctl.runtime.ops import EPS
from rlctl.tracking.metrics import Metrics


def vanilla(tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Metrics]:
    """Return M = max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)); min(M, −A·c) where A < 0: (T,).

    PPO, arXiv 1707.06347, equation 7. Two bounds: DAPO, arXiv 2503.14476 (Clip-Higher). Dual clip
    with c > 1: arXiv 1912.09729.
    """
    d = tokens.log_ratio
    bound, is_clipped = clipped(d.exp(), tokens, clip)
    ceiling = -tokens.advantages * clip.c
    is_lower = (tokens.advantages < 0) & (bound > ceiling)
    metrics = {
        "actor/pg_clipfrac": is_clipped,
        "actor/pg_clipfrac_lower": is_lower,
        "actor/ppo_kl": -d,
    }
    return torch.where(is_lower, ceiling, bound), token_means(tokens.mask, metrics)


@policy_loss(aggregation="seq-mean-token-mean")
def gspo(tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Metrics]:
    """Return PPO's clipped loss of the sequence ratio exp(mean_t d), on each token: (T,).

    GSPO-token, arXiv 2507.18071. The weight of a token is exp(min(lp − sg(lp) + sg(s), 10)), with s
    the mean of d over its row, so each token has a gradient. No dual clip. Averaged over rows, as
    in the paper.
    """
    d = tokens.log_ratio
    log_weight = tokens.log_probs - tokens.log_probs.detach() + tokens.mean_of_row(d).detach()
    losses, is_clipped = clipped(log_weight.clamp(max=10.0).exp(), tokens, clip)
    return losses, token_means(tokens.mask, {"actor/pg_clipfrac": is_clipped, "actor/ppo_kl": -d})


@policy_loss(aggregation="seq-mean-token-mean", per_row=True)
def geo_mean(tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Metrics]:
    """Return −mean_t(A)·exp(mean_t d') of the row, on each of its tokens: (T,).

    GMPO, arXiv 2507.20673. d' is the pessimistic one of d and clamp(d, −low, high): low and high
    bound the *logarithm* of the ratio (0.4 in the paper). The mean over tokens and rows is the mean
    over rows. Weights of rollout correction enter as the geometric mean of the row, as in verl.
    """
    d = tokens.log_ratio
    held = d.clamp(-clip.low, clip.high)
    sign = tokens.advantages.sign()
    pessimistic = sign * torch.minimum(sign * d, sign * held)  # 0 where A = 0, as in verl
    losses = -tokens.mean_of_row(tokens.advantages) * tokens.mean_of_row(pessimistic).exp()
    is_clipped = d != held
    metrics = {
        "actor/pg_clipfrac": is_clipped & (tokens.advantages > 0),
        "actor/pg_clipfrac_lower": is_clipped & (tokens.advantages < 0),
        "actor/ppo_kl": -d,
    }
    return losses, token_means(tokens.mask, metrics)


def cispo(tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Metrics]:
    """Return −sg(clip(ρ, 1 − low, 1 + high))·A·log π: (T,). Every token keeps a gradient.

    MiniMax-M1, arXiv 2506.13585. The paper has no lower bound in its experiments; here it is `low`,
    as in verl.
    """
    d = tokens.log_ratio
    ratio = d.exp().detach()
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    metrics = {"actor/pg_clipfrac": weight != ratio, "actor/ppo_kl": -d}
    return -weight * tokens.advantages * tokens.log_probs, token_means(tokens.mask, metrics)


class SapoParams(Params):
    """Temperatures of the gate."""

    tau_pos: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="temperature for positive advantages"
    )
    tau_neg: float = Field(
        default=1.05, gt=0, allow_inf_nan=False, description="temperature for the other advantages"
    )


@policy_loss(aggregation="seq-mean-token-mean", params=SapoParams)
def sapo(tokens: PolicyTokens, clip: ClipRange, params: SapoParams) -> tuple[Tensor, Metrics]:
    """Return −A·(4/τ)·sigmoid(τ(ρ − 1)): (T,). The slope of the gate is 1 at ρ = 1.

    SAPO, arXiv 2511.20347. τ is `tau_pos` for A > 0 and `tau_neg` otherwise. Averaged over rows, as
    in the paper.
    """
    d = tokens.log_ratio
    tau = torch.where(tokens.advantages > 0, params.tau_pos, params.tau_neg)
    gate = torch.sigmoid(tau * (d.exp() - 1)) * (4 / tau)
    return -tokens.advantages * gate, token_means(tokens.mask, {"actor/ppo_kl": -d})


class DroParams(Params):
    """Weight of the penalty."""

    beta: float = Field(
        default=0.05,
        ge=0,
        allow_inf_nan=False,
        description="weight β of the quadratic penalty on the log-ratio",
    )


@policy_loss(params=DroParams)
def dro(tokens: PolicyTokens, clip: ClipRange, params: DroParams) -> tuple[Tensor, Metrics]:
    """Return −(A·log π − β/2·d²): (T,). DRO, arXiv 2405.19107, with A instead of r − V."""
    d = tokens.log_ratio
    losses = -(tokens.advantages * tokens.log_probs - params.beta / 2 * d.square())
    return losses, token_means(tokens.mask, {"actor/ppo_kl": -d})


def gpg(tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Metrics]:
    """Return −A·log π: (T,). GPG, arXiv 2504.02546."""
    losses = -tokens.advantages * tokens.log_probs
    return losses, token_means(tokens.mask, {"actor/ppo_kl": -tokens.log_ratio})


def _gated(tokens: PolicyTokens, clip: ClipRange, kept: Tensor) -> tuple[Tensor, Metrics]:
    """Return −A·sg(min(ρ, c))·log π where `kept` (T,) is True, 0 elsewhere: (T,)."""
    d = tokens.log_ratio
    ratio = d.exp().detach()
    losses = -tokens.advantages * ratio.clamp(max=clip.c) * tokens.log_probs * kept
    metrics = {
        "actor/pg_clipfrac": ~kept,
        "actor/pg_clipfrac_lower": kept & (ratio > clip.c),
        "actor/ppo_kl": -d,
    }
    return losses, token_means(tokens.mask, metrics)


def _probs(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Return π and π_old of each token: (T,) each, without a graph."""
    return tokens.log_probs.detach().exp(), tokens.old_log_probs.exp()


def dppo_tv(tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Metrics]:
    """Return the gated loss (T,), bounded by the binary total variation.

    A token counts if its probability rose by at most `high` (A > 0), or fell by at most `low`.
    """
    prob, old_prob = _probs(tokens)
    rise = prob - old_prob
    kept = torch.where(tokens.advantages > 0, rise <= clip.high, rise >= -clip.low)
    return _gated(tokens, clip, kept)


def dppo_kl(tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Metrics]:
    """Return the gated loss (T,), bounded by the binary KL(π_old ‖ π).

    A token counts if the KL is at most `high` (A > 0) or `low` (A ≤ 0), or if its probability moved
    against the sign of the advantage.
    """
    prob, old_prob = _probs(tokens)
    kl = old_prob * (tokens.old_log_probs - tokens.log_probs.detach())
    kl = kl + (1 - old_prob) * ((1 - old_prob + EPS) / (1 - prob + EPS)).log()
    rose = (kl <= clip.high) | (prob <= old_prob)
    fell = (kl <= clip.low) | (prob >= old_prob)
    return _gated(tokens, clip, torch.where(tokens.advantages > 0, rose, fell))
