"""GRPO with an advantage per turn: returns of turns compared within the group of one prompt."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from rlctl.plugins import Params
from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    normalised,
)
from rlctl.runtime.algorithms.base import Needs


class TurnParams(Params):
    """Settings of `grpo_turns`."""

    turn_discount: float = Field(1.0, ge=0, le=1, description="discount of a reward per turn")


@estimator(needs=Needs.COMPARISON, params=TurnParams, by_group=True, uses=("norm_by_std",))
def grpo_turns(
    inputs: AdvantageInputs, config: AdvantageConfig, params: TurnParams
) -> tuple[Tensor, Tensor]:
    """Return (G_k − μ)/(σ + 1e-6) on the tokens of turn k, and G_k: (B, R) each.

    G_k = Σ_{j≥k} d^{j−k} r_j is the discounted return from turn k; μ and σ are taken over all turns
    of the group. After GRPO's process supervision (arXiv 2402.03300, section 4.1.3), which sums
    normalised rewards where this normalises returns. Responses of one turn give GRPO's outcome
    supervision. Without `norm_by_std`, σ is left out.
    """
    turn = inputs.turn
    if turn is None:
        turn = torch.zeros_like(inputs.mask, dtype=torch.int64)
    num_turns = int(turn.max()) + 1 if turn.numel() else 1
    rewards = inputs.rewards.new_zeros(len(turn), num_turns).scatter_add_(1, turn, inputs.rewards)
    returns = torch.zeros_like(rewards)  # (B, K)
    later = rewards.new_zeros(len(turn))
    for k in reversed(range(num_turns)):
        later = rewards[:, k] + params.turn_discount * later
        returns[:, k] = later
    has_turn = torch.zeros_like(rewards).scatter_add_(1, turn, inputs.mask) > 0  # (B, K)
    row, number = has_turn.nonzero(as_tuple=True)
    advantages = torch.zeros_like(returns)
    advantages[row, number] = normalised(
        returns[row, number], inputs.group[row], config.norm_by_std
    )
    return advantages.gather(1, turn) * inputs.mask, returns.gather(1, turn) * inputs.mask
