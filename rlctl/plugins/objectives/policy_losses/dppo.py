"""DPPO, arXiv 2602.04879: a bound on the divergence of the two policies instead of their ratio.

A rare token may change its ratio a lot and its probability hardly; PPO clips it, DPPO does not. The
divergence is that of the two distributions "this token or another". `low` and `high` of `ClipRange`
are divergences here; `c` truncates the ratio (the paper advises 20).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.policy_losses.base import ClipRange, PolicyTokens, token_means
from rlctl.runtime.base.metrics import Metrics
from rlctl.runtime.base.ops import EPS


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
