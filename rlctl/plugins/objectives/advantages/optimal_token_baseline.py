"""The optimal token baseline: one baseline per group and position."""

from __future__ import annotations

from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    reward_to_go,
)
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.ops import EPS, dense_groups, group_sum


@estimator(needs=Needs.COMPARISON | Needs.SUM_PI_SQUARED, by_group=True, uses=())
def optimal_token_baseline(
    inputs: AdvantageInputs, config: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Return the reward to go G minus its baseline, and G: (B, R) each. arXiv 2602.07078.

    The baseline of a group and position is Σ_i G_i·W_i / Σ_i W_i over the rows that reach it.
    W_t = Σ_{j ≤ t} (1 − 2π_j + Σ_v π_j(v)²) estimates the squared gradient norm of the response up
    to t. If only one row of the group reaches a position, the baseline is 0 (as in verl for
    responses without tool output). Weights of rollout correction do not enter W.
    """
    mask = inputs.mask
    returns = reward_to_go(inputs)
    energy = 1 - 2 * inputs.given("log_probs").exp() + inputs.given("sum_pi_squared")
    weight = (energy * mask).cumsum(-1) * mask  # (B, R)
    dense, num_groups = dense_groups(inputs.group)
    total = group_sum(weight, dense, num_groups)  # (G, R)
    baseline = group_sum(returns * weight, dense, num_groups) / (total + EPS)
    baseline = baseline.masked_fill(group_sum(mask, dense, num_groups) <= 1, 0.0)
    return (returns - baseline[dense]) * mask, returns
