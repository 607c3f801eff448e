"""VAPO: GAE with a λ for each response's length, and another λ for the critic."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from rlctl.plugins import Params
from rlctl.runtime.algorithms.advantages.base import AdvantageConfig, AdvantageInputs, estimator
from rlctl.runtime.algorithms.advantages.gae import advantage_sums
from rlctl.runtime.algorithms.base import Needs


class VapoParams(Params):
    """Settings of `vapo`."""

    alpha: float = Field(default=0.05, gt=0, description="α of λ = 1 − 1/(α·length)")
    critic_lambda: float = Field(default=1.0, ge=0, le=1, description="λ of the critic's returns")


@estimator(needs=Needs.CRITIC, params=VapoParams, by_group=True, uses=("gamma",))
def vapo(
    inputs: AdvantageInputs, config: AdvantageConfig, params: VapoParams
) -> tuple[Tensor, Tensor]:
    """Return GAE's advantages with λ = max(0, 1 − 1/(α·l)) for a row of l tokens, and returns.

    Length-adaptive GAE, VAPO (arXiv 2504.05118, section 4.2); the returns have a separate λ
    (decoupled GAE, VC-PPO, arXiv 2503.01491). l counts the tokens that the policy wrote. Both are
    (B, R); the advantages are whitened as in `gae`.
    """
    length = inputs.mask.sum(-1).clamp(min=1)  # (B,)
    lam = (1 - 1 / (params.alpha * length)).clamp(min=0)
    advantages = advantage_sums(inputs, config.gamma, lam)
    returns = advantage_sums(inputs, config.gamma, params.critic_lambda) + inputs.given("values")
    return inputs.whitened(advantages), returns
