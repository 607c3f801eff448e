"""GMPO: the geometric mean of the token ratios of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    policy_loss,
    token_means,
)
from rlctl.runtime.base.metrics import Metrics


@policy_loss(aggregation="seq-mean-token-mean", per_row=True, uses=("low", "high"))
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
