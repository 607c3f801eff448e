"""CISPO: clipped importance weights on log-probs."""

from __future__ import annotations

from torch import Tensor

from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    policy_loss,
    token_means,
)
from rlctl.runtime.base.metrics import Metrics


@policy_loss(uses=("low", "high"))
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
