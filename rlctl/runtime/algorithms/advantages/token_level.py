"""Advantages token by token, and the door to all estimators.

r are token rewards, m the response mask, V values; t walks a row. Names and definitions are verl's, so that results can be compared.
Estimators that give one number a row stand in `group_advantages`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl import plugins
from rlctl.runtime.algorithms.advantages import group_level  # noqa: F401  (its estimators register themselves)
from rlctl.runtime.algorithms.advantages.base import (
    ESTIMATORS,
    AdvantageInputs,
    AdvantageParams,
    Estimator,
    Need,
    estimator,
)
from rlctl.runtime.ops import EPS, dense_groups, group_sum, masked_whiten

__all__ = [
    "ESTIMATORS",
    "AdvantageInputs",
    "AdvantageParams",
    "Estimator",
    "Need",
    "estimator",
    "get_estimator",
]


def get_estimator(name: str) -> Estimator:
    """The estimator of that name, or a user's function `module:name`; `ConfigError` with the nearest name and the list of all otherwise.

    A user's function has no needs but those that `@estimator` declares on it.
    """
    if ":" not in name:
        return ESTIMATORS.look_up(name)
    function = plugins.load("advantage estimators", name)
    return next(
        (known for known in ESTIMATORS.values() if known.compute is function),
        Estimator(name, Need.NOTHING, function),
    )


def _reward_to_go(inputs: AdvantageInputs) -> Tensor:
    """Σ_{t' ≥ t} r·m: (B, R)."""
    return (inputs.rewards * inputs.mask).flip(-1).cumsum(-1).flip(-1)


@estimator("gae", needs=Need.VALUES)
def gae(inputs: AdvantageInputs, params: AdvantageParams) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, arXiv 1506.02438, equation 16: A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} − V_t.

    Masked tokens are skipped: t+1 is the next token that the policy wrote, so a tool's output is no time step. Returns are A + V; then A is
    whitened over all unmasked tokens of the batch (not in the paper). Masked entries hold what the recursion carried past them.
    """
    rewards, values = (
        inputs.rewards.T.contiguous(),
        inputs.given("values").T.contiguous(),
    )  # (R, B): a step of the loop reads one line
    written = inputs.mask.T.contiguous() > 0
    raw = torch.empty_like(rewards)
    next_value = last = rewards.new_zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + params.gamma * next_value - values[t]
        last = torch.where(written[t], delta + params.gamma * params.lam * last, last)
        next_value = torch.where(written[t], values[t], next_value)
        raw[t] = last
    returns, raw = (raw + values).T.contiguous(), raw.T.contiguous()
    return masked_whiten(raw, inputs.mask), returns


@estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, params: AdvantageParams) -> tuple[Tensor, Tensor]:
    """The discounted return G_t = r_t + γ·G_{t+1}, whitened over the unmasked tokens of the batch. REINFORCE++, arXiv 2501.03262.

    Masked tokens are skipped: they are no time step, the return passes over them undiscounted. A reward on a masked token is lost.
    """
    rewards, mask = inputs.rewards.T.contiguous(), inputs.mask.T.contiguous()  # (R, B)
    returns = torch.empty_like(rewards)
    running = rewards.new_zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        running = torch.where(mask[t] > 0, rewards[t] + params.gamma * running, running)
        returns[t] = running * mask[t]
    returns = returns.T.contiguous()
    return masked_whiten(returns, inputs.mask) * inputs.mask, returns


@estimator("remax", needs=Need.GREEDY_BASELINE)
def remax(inputs: AdvantageInputs, params: AdvantageParams) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """The undiscounted reward to go minus the score of a greedy answer to the same prompt. ReMax, arXiv 2310.10505."""
    returns = _reward_to_go(inputs)
    return returns - inputs.given("greedy_scores")[:, None] * inputs.mask, returns


@estimator("optimal_token_baseline", needs=Need.GROUPS | Need.SUM_PI_SQUARED)
def optimal_token_baseline(
    inputs: AdvantageInputs, params: AdvantageParams
) -> tuple[Tensor, Tensor]:
    """Reward to go minus a baseline of each group and position, Σ_i G_i·W_i / Σ_i W_i over the rows that reach it. arXiv 2602.07078.

    W_t = Σ_{j ≤ t} (1 − 2π_j + Σ_v π_j(v)²) stands for the gradient norm of the answer so far. Where only one row of the group reaches a
    position its baseline would be its own return; there it is 0, so a group of one and the tail of the longest answer keep their return
    (verl does the same for tails of answers without tool output). Weights of rollout correction do not enter W.
    """
    mask = inputs.mask
    returns = _reward_to_go(inputs)
    energy = 1 - 2 * inputs.given("log_probs").exp() + inputs.given("sum_pi_squared")
    weight = (energy * mask).cumsum(-1) * mask  # (B, R)
    dense, num_groups = dense_groups(inputs.group)
    total = group_sum(weight, dense, num_groups)  # (G, R)
    baseline = group_sum(returns * weight, dense, num_groups) / (total + EPS)
    baseline = baseline.masked_fill(group_sum(mask, dense, num_groups) <= 1, 0.0)
    return (returns - baseline[dense]) * mask, returns
