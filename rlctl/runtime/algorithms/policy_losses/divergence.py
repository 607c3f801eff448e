"""DPPO: the trust region is a bound on the divergence of the two policies at a token, not on their ratio. arXiv 2602.04879.

A rare token may change its ratio a lot and its probability hardly; PPO clips it, DPPO does not. The divergence is that of the two
distributions "this token or another". `low` and `high` of `ClipParams` are divergences here; `c` truncates the ratio (20 is advised).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.policy_losses.base import (
    ClipParams,
    PolicyTokens,
    policy_loss,
    token_means,
)
from rlctl.runtime.ops import EPS
from rlctl.tracking.metrics import Metrics


def _gated(tokens: PolicyTokens, params: ClipParams, kept: Tensor) -> tuple[Tensor, Metrics]:
    """−A·sg(min(ρ, c))·log π where `kept` (T,) is true, 0 elsewhere."""
    d = tokens.log_ratio
    ratio = d.exp().detach()
    losses = -tokens.advantages * ratio.clamp(max=params.c) * tokens.log_probs * kept
    metrics = {
        "actor/pg_clipfrac": ~kept,
        "actor/pg_clipfrac_lower": kept & (ratio > params.c),
        "actor/ppo_kl": -d,
    }
    return losses, token_means(tokens.mask, metrics)


def _probs(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    return tokens.log_probs.detach().exp(), tokens.old_log_probs.exp()


@policy_loss("dppo_tv")
def dppo_tv(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
    """Binary total variation: for A > 0 the token's probability may have risen by `high` at most, else have fallen by `low` at most."""
    prob, old_prob = _probs(tokens)
    rise = prob - old_prob
    return _gated(
        tokens, params, torch.where(tokens.advantages > 0, rise <= params.high, rise >= -params.low)
    )


@policy_loss("dppo_kl")
def dppo_kl(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
    """Binary KL(π_old ‖ π): at most `high` where A > 0 and the probability rose, at most `low` where A ≤ 0 and it fell."""
    prob, old_prob = _probs(tokens)
    kl = old_prob * (tokens.old_log_probs - tokens.log_probs.detach())
    kl = kl + (1 - old_prob) * ((1 - old_prob + EPS) / (1 - prob + EPS)).log()
    rose = (kl <= params.high) | (prob <= old_prob)
    fell = (kl <= params.low) | (prob >= old_prob)
    return _gated(tokens, params, torch.where(tokens.advantages > 0, rose, fell))
