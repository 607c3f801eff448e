"""SAPO: a soft gate instead of the clip."""

from __future__ import annotations

import torch
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


class SapoParams(Params):
    """Temperatures of the gate."""

    tau_pos: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="temperature for positive advantages"
    )
    tau_neg: float = Field(
        default=1.05, gt=0, allow_inf_nan=False, description="temperature for the other advantages"
    )


@policy_loss(aggregation="seq-mean-token-mean", params=SapoParams, uses=())
def sapo(tokens: PolicyTokens, clip: ClipRange, params: SapoParams) -> tuple[Tensor, Metrics]:
    """Return −A·(4/τ)·sigmoid(τ(ρ − 1)): (T,). The slope of the gate is 1 at ρ = 1.

    SAPO, arXiv 2511.20347. τ is `tau_pos` for A > 0 and `tau_neg` otherwise. Averaged over rows, as
    in the paper.
    """
    d = tokens.log_ratio
    tau = torch.where(tokens.advantages > 0, params.tau_pos, params.tau_neg)
    gate = torch.sigmoid(tau * (d.exp() - 1)) * (4 / tau)
    return -tokens.advantages * gate, token_means(tokens.mask, {"actor/ppo_kl": -d})
