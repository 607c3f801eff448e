"""PPO's clipped loss with dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    clipped,
    token_means,
)
from rlctl.runtime.base.metrics import Metrics


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
