"""The optimal token baseline of episodes: tokens of tools are no positions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlctl.plugins.objectives.advantages.optimal_token_baseline import optimal_token_baseline
from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    reward_to_go,
)
from rlctl.runtime.algorithms.base import Needs


@estimator(needs=Needs.COMPARISON | Needs.SUM_PI_SQUARED, by_group=True, uses=())
def tir_optimal_token_baseline(
    inputs: AdvantageInputs, config: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Return the reward to go minus its baseline, and the former: (B, R) each.

    As `optimal_token_baseline` (arXiv 2602.07078), but the baseline at the k-th token that the
    policy wrote is over the k-th tokens of the group, whatever tools wrote before. A reward on the
    token of a tool is lost, as in verl.
    """
    inside = inputs.mask > 0
    place = torch.where(inside, inside.cumsum(-1), 0)  # (B, R), from 1; 0 = a tool's token
    width = int(place.max()) if place.numel() else 0

    def side_by_side(x: Tensor) -> Tensor:
        return x.new_zeros(len(x), width + 1).scatter(1, place, x)[:, 1:]  # (B, width)

    of_policy = replace(
        inputs,
        rewards=side_by_side(inputs.rewards),
        mask=side_by_side(inputs.mask),
        log_probs=side_by_side(inputs.given("log_probs")),
        sum_pi_squared=side_by_side(inputs.given("sum_pi_squared")),
    )
    advantages, _ = optimal_token_baseline(of_policy, config)
    padded = torch.nn.functional.pad(advantages, (1, 0))  # (B, 1 + width)
    return padded.gather(1, place) * inputs.mask, reward_to_go(inputs)
