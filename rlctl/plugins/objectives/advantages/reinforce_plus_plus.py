"""REINFORCE++, with and without a group baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    normalised,
    on_tokens,
)
from rlctl.runtime.algorithms.base import Needs


@estimator(by_group=True, uses=("gamma",))
def reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return the whitened and the raw discounted return G_t = r_t + γ·G_{t+1}: (B, R) each.

    REINFORCE++, arXiv 2501.03262. Whitened over the unmasked tokens of the batch. Masked tokens
    are skipped: the return passes over them undiscounted, and a reward on them is lost.
    """
    rewards = inputs.rewards.T.contiguous()  # (R, B)
    mask = inputs.mask.T.contiguous()  # (R, B)
    returns = torch.empty_like(rewards)
    running = rewards.new_zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        running = torch.where(mask[t] > 0, rewards[t] + config.gamma * running, running)
        returns[t] = running * mask[t]
    returns = returns.T.contiguous()
    return inputs.whitened(returns) * inputs.mask, returns


@estimator(needs=Needs.COMPARISON, by_group=True, uses=())
def reinforce_plus_plus_baseline(
    inputs: AdvantageInputs, config: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Return s − μ_g on every token, whitened over all tokens of the batch: (B, R), twice.

    REINFORCE++ with baseline, arXiv 2501.03262. Long responses weigh more in the moments, because
    they have more tokens.
    """
    scores = normalised(inputs.scores, inputs.group, by_std=False, counted=inputs.counted)
    centred, _ = on_tokens(scores, inputs)
    advantages = inputs.whitened(centred) * inputs.mask
    return advantages, advantages
