"""Estimators from the returns of tokens: GAE (PPO), VAPO, REINFORCE++ and ReMax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from rlctl.plugins import Params, declare
from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    normalised,
    on_tokens,
    reward_to_go,
)
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.batch import Scored


@estimator(needs=Needs.CRITIC, by_group=True)
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
    rewards, values = inputs.rewards.T.contiguous(), inputs.given("values").T.contiguous()
    written = inputs.mask.T.contiguous() > 0
    raw = torch.empty_like(rewards)
    next_value = last = rewards.new_zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        last = torch.where(written[t], delta + gamma * lam * last, last)
        next_value = torch.where(written[t], values[t], next_value)
        raw[t] = last
    return raw.T.contiguous()


class VapoParams(Params):
    """Settings of `vapo`."""

    alpha: float = Field(default=0.05, gt=0, description="α of λ = 1 − 1/(α·length)")
    critic_lambda: float = Field(default=1.0, ge=0, le=1, description="λ of the critic's returns")


@declare(unused_keys=("algorithm.lam",))
@estimator(needs=Needs.CRITIC, params=VapoParams, by_group=True)
def vapo(
    inputs: AdvantageInputs, config: AdvantageConfig, params: VapoParams
) -> tuple[Tensor, Tensor]:
    """Return GAE's advantages with λ = max(0, 1 − 1/(α·l)) for a row of l tokens, and returns.

    Length-adaptive GAE, VAPO (arXiv 2504.05118, section 4.2); the returns have a λ of their own
    (decoupled GAE, VC-PPO, arXiv 2503.01491). l counts the tokens that the policy wrote. Both are
    (B, R); the advantages are whitened as in `gae`.
    """
    length = inputs.mask.sum(-1).clamp(min=1)  # (B,)
    lam = (1 - 1 / (params.alpha * length)).clamp(min=0)
    advantages = advantage_sums(inputs, config.gamma, lam)
    returns = advantage_sums(inputs, config.gamma, params.critic_lambda) + inputs.given("values")
    return inputs.whitened(advantages), returns


@estimator(by_group=True)
def reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return the whitened and the raw discounted return G_t = r_t + γ·G_{t+1}: (B, R) each.

    REINFORCE++, arXiv 2501.03262. Whitened over the unmasked tokens of the batch. Masked tokens
    are skipped: the return passes over them undiscounted, and a reward on them is lost.
    """
    rewards, mask = inputs.rewards.T.contiguous(), inputs.mask.T.contiguous()  # (R, B)
    returns = torch.empty_like(rewards)
    running = rewards.new_zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        running = torch.where(mask[t] > 0, rewards[t] + config.gamma * running, running)
        returns[t] = running * mask[t]
    returns = returns.T.contiguous()
    return inputs.whitened(returns) * inputs.mask, returns


@estimator(needs=Needs.COMPARISON, by_group=True)
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


@estimator(needs=Needs.GREEDY_BASELINE, by_group=True)
def remax(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return the reward to go minus the greedy response's score, and the former: (B, R) each.

    ReMax, arXiv 2310.10505. Undiscounted.
    """
    returns = reward_to_go(inputs)
    return returns - inputs.given("greedy_scores")[:, None] * inputs.mask, returns


def with_baseline(
    scored: Scored, greedy: Scored, penalised: Callable[[Tensor, Scored], Tensor]
) -> Scored:
    """Return the batch with the baselines of P prompts, one response in `greedy` each.

    `penalised` subtracts penalties from the scores (B,) or (P,) of a batch. A response whose
    baseline failed has failed, too. If it is kept, its baseline is its own score, so that its
    advantage is 0.
    """
    _, prompt = scored.group.unique_consecutive(return_inverse=True)  # (B,)
    failed = greedy.failed.clone()
    if greedy.episodes:
        failed |= torch.tensor([episode.failed for episode in greedy.episodes])
    failed = failed[prompt]
    return replace(
        scored,
        failed=scored.failed | failed,
        greedy_scores=torch.where(
            failed, penalised(scored.scores, scored), penalised(greedy.scores, greedy)[prompt]
        ),
    )
