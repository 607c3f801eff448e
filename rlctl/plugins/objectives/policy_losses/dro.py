"""DRO: a quadratic penalty on the log-ratio instead of a clip."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from rlctl.plugins import Params
from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    policy_loss,
    token_means,
)
from rlctl.runtime.base.metrics import Metrics


class DroParams(Params):
    """Weight of the penalty."""

    beta: float = Field(
        default=0.05,
        ge=0,
        allow_inf_nan=False,
        description="weight β of the quadratic penalty on the log-ratio",
    )


@policy_loss(params=DroParams, uses=())
def dro(tokens: PolicyTokens, clip: ClipRange, params: DroParams) -> tuple[Tensor, Metrics]:
    """Return −(A·log π − β/2·d²): (T,). DRO, arXiv 2405.19107, with A instead of r − V."""
    d = tokens.log_ratio
    losses = -(tokens.advantages * tokens.log_probs - params.beta / 2 * d.square())
    return losses, token_means(tokens.mask, {"actor/ppo_kl": -d})
