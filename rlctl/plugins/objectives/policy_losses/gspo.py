"""GSPO: PPO's clip on the ratio of the sequence."""

from __future__ import annotations

from torch import Tensor

from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    clipped,
    policy_loss,
    token_means,
)
from rlctl.runtime.base.metrics import Metrics


@policy_loss(advised="seq-mean-token-mean", uses=("low", "high"))
def gspo(tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Metrics]:
    """Return PPO's clipped loss of the sequence ratio exp(mean_t d), on each token: (T,).

    GSPO-token, arXiv 2507.18071. The weight of a token is exp(min(lp − sg(lp) + sg(s), 10)), with s
    the mean of d over its row, so each token has a gradient. No dual clip. The paper averages over
    tokens and then over rows; other modes weigh rows by their lengths.
    """
    d = tokens.log_ratio
    log_weight = tokens.log_probs - tokens.log_probs.detach() + tokens.mean_of_row(d).detach()
    losses, is_clipped = clipped(log_weight.clamp(max=10.0).exp(), tokens, clip)
    return losses, token_means(tokens.mask, {"actor/pg_clipfrac": is_clipped, "actor/ppo_kl": -d})
