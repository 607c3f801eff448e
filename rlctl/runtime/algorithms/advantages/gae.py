"""Generalised advantage estimation (PPO)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import AdvantageConfig, AdvantageInputs, estimator
from rlctl.runtime.algorithms.base import Needs


@estimator(needs=Needs.CRITIC, by_group=True, uses=("gamma", "lam"))
def gae(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} − V_t, and A + V: (B, R) each.

    arXiv 1506.02438, equation 16. Masked tokens are skipped: t+1 is the next token that the policy
    wrote, so a tool's output is no time step. After the returns are computed, A is whitened over
    all unmasked tokens of the batch (not in the paper). Masked entries are not zeroed.
    """
    raw = advantage_sums(inputs, config.gamma, config.lam)
    return inputs.whitened(raw), raw + inputs.given("values")


def advantage_sums(inputs: AdvantageInputs, gamma: float, lam: float | Tensor) -> Tensor:
    """Return Σ_l (γλ)^l·δ_{t+l} over the tokens that the policy wrote: (B, R), not whitened.

    `lam` is a number or one per row, (B,).
    """
    # (R, B): each step of the loop reads one contiguous row
    rewards = inputs.rewards.T.contiguous()
    values = inputs.given("values").T.contiguous()
    written = inputs.mask.T.contiguous() > 0
    raw = torch.empty_like(rewards)
    next_value = last = rewards.new_zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        last = torch.where(written[t], delta + gamma * lam * last, last)
        next_value = torch.where(written[t], values[t], next_value)
        raw[t] = last
    return raw.T.contiguous()
