"""The plain policy gradient (GPG)."""

from __future__ import annotations

from torch import Tensor

from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    policy_loss,
    token_means,
)
from rlctl.runtime.base.metrics import Metrics


@policy_loss(uses=())
def gpg(tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Metrics]:
    """Return −A·log π: (T,). GPG, arXiv 2504.02546."""
    losses = -tokens.advantages * tokens.log_probs
    return losses, token_means(tokens.mask, {"actor/ppo_kl": -tokens.log_ratio})
