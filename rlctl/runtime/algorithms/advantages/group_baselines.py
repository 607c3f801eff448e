"""Scores compared within the group of one prompt: GRPO, Dr.GRPO, and estimators with a baseline."""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.plugins import Params
from rlctl.runtime.algorithms.advantages.base import (
    STD_EPS,
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    normalised,
    on_tokens,
    reward_to_go,
)
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.ops import EPS, dense_groups, group_stats, group_sum


@estimator(needs=Needs.COMPARISON, by_group=True)
def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return (s − μ_g)/(σ_g + 1e-6) on every token: (B, R), twice.

    GRPO, arXiv 2402.03300, section 4.1.2 (outcome supervision). `norm_by_std=False` leaves σ out:
    Dr.GRPO, arXiv 2503.20783. A group of one keeps its score; the papers have no such groups.
    """
    scores = normalised(inputs.scores, inputs.group, config.norm_by_std, inputs.counted)
    return on_tokens(scores, inputs)


@estimator(needs=Needs.COMPARISON, by_group=True)
def grpo_passk(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return best − second best of a group for its best row, 0 for the others: (B, R), twice.

    arXiv 2503.19595. Divided by σ_g + 1e-6 with `norm_by_std`. Raises ValueError for a group of
    one, which has no second best.
    """
    counted = inputs.counted
    scores, group = inputs.scores[counted], inputs.group[counted]  # (E,): of E episodes
    dense, num_groups = dense_groups(group)
    size = torch.bincount(dense, minlength=num_groups)
    if bool((size < 2).any()):
        raise ValueError(
            "pass@k needs at least two responses to each prompt; raise actor_rollout_ref.rollout.n"
        )
    by_score = scores.argsort(descending=True, stable=True)
    order = by_score[dense[by_score].argsort(stable=True)]  # by group, best row first
    first = size.cumsum(0) - size  # (G,)
    best = order[first]
    lead = scores[best] - scores[order[first + 1]]
    if config.norm_by_std:
        lead = lead / (group_stats(scores, group).std[best] + STD_EPS)
    advantages = torch.zeros_like(scores).index_put((best,), lead)
    if inputs.episode is not None:
        own = inputs.episode[counted].argsort()  # the episode of each number
        advantages = advantages[own][inputs.episode]
    return on_tokens(advantages, inputs)


@estimator(needs=Needs.COMPARISON, by_group=True)
def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return s minus the mean of the *other* rows of the group, on every token: (B, R), twice.

    RLOO, arXiv 2402.14740. Equal to n/(n−1)·(s − μ_g). A group of one keeps its score; the paper
    has no such groups.
    """
    stats = group_stats(inputs.scores, inputs.group, inputs.counted)
    leave_one_out = stats.size / (stats.size - 1).clamp(min=1)
    return on_tokens((inputs.scores - stats.mean) * leave_one_out, inputs)


@estimator(needs=Needs.COMPARISON, by_group=True)
def maxrl(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return (s − μ_g)/(μ_g + 1e-6) on every token: (B, R), twice.

    MaxRL, arXiv 2602.02710: with scores 0 and 1 the mean over n responses is an unbiased gradient
    of log p, the probability of a correct response, truncated after n terms of its series. The
    paper has no scores below 0 and no groups of one: s − μ_g is not divided where μ_g ≤ 0, and a
    group of one keeps its score.
    """
    mean = group_stats(inputs.scores, inputs.group, inputs.counted).mean
    scale = torch.where(mean > 0, mean + STD_EPS, 1.0)
    return on_tokens((inputs.scores - mean) / scale, inputs)


@estimator(needs=Needs.COMPARISON, by_group=True)
def opo(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return s − Σ len·s / Σ len over the group, on every token: (B, R), twice.

    OPO, arXiv 2505.23585: the optimal baseline if gradients grow with the length. A group of one
    episode has a baseline of 0, not its own score.
    """
    dense, num_groups = dense_groups(inputs.group)
    lengths = inputs.mask.sum(-1)  # (B,)
    weight = group_sum(lengths, dense, num_groups).clamp(min=1.0)
    baseline = group_sum(lengths * inputs.scores, dense, num_groups) / weight
    size = torch.bincount(dense[inputs.counted], minlength=num_groups)
    baseline = baseline.masked_fill(size == 1, 0.0)
    return on_tokens(inputs.scores - baseline[dense], inputs)


@estimator(needs=Needs.COMPARISON)
def gpg(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return α·(s − μ_g), α = B / max(1, number of rows with s ≠ 0), on tokens: (B, R), twice.

    GPG, arXiv 2504.02546, with F_norm = 1. The paper's α counts the rows of groups whose scores
    differ; verl and rlctl count the rows with a score.
    """
    scores, counted = inputs.scores, inputs.counted
    alpha = counted.sum() / scores[counted].count_nonzero().clamp(min=1)
    return on_tokens(alpha * normalised(scores, inputs.group, False, counted), inputs)


@estimator(needs=Needs.COMPARISON | Needs.SUM_PI_SQUARED, by_group=True)
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


class TurnParams(Params):
    """Settings of `grpo_turns`."""

    turn_discount: float = Field(1.0, ge=0, le=1, description="discount of a reward per turn")


@estimator(needs=Needs.COMPARISON, params=TurnParams, by_group=True)
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


class GdpoParams(Params):
    """Components of the reward and their weights."""

    reward_keys: tuple[str, ...] | None = Field(
        default=None, description="components of the reward that count; null = all"
    )
    reward_weights: tuple[float, ...] | None = Field(
        default=None, description="one weight for each of reward_keys; null = 1 each"
    )

    @model_validator(mode="after")
    def _one_weight_per_key(self) -> Self:
        weights, keys = self.reward_weights, self.reward_keys or ()
        if weights is not None and len(weights) != len(keys):
            raise ValueError(
                f"reward_weights has {len(weights)} weights for {len(keys)} reward_keys"
            )
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each selected component; empty = all components, 1 each."""
        keys = self.reward_keys or ()
        return dict(zip(keys, self.reward_weights or (1.0,) * len(keys), strict=True))


@estimator(needs=Needs.COMPARISON | Needs.COMPONENTS, params=GdpoParams, by_group=True)
def gdpo(
    inputs: AdvantageInputs, config: AdvantageConfig, params: GdpoParams
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of each component's GRPO advantages, whitened: (B, R), twice.

    GDPO, arXiv 2601.05242. A component with small numbers counts as much as one with large
    numbers. Raises ConfigError for a key that is no component of the reward.
    """
    if missing := sorted(set(params.weights) - set(inputs.components)):
        known = ", ".join(sorted(inputs.components)) or "none"
        raise ConfigError(
            f"the reward has no component {', '.join(missing)}; its components: {known}",
            where="algorithm.adv_estimator_params.reward_keys",
        )
    weights = params.weights or dict.fromkeys(inputs.components, 1.0)
    total = torch.zeros_like(inputs.scores)
    for name, weight in weights.items():
        component = inputs.components[name].to(total)
        total = total + weight * normalised(
            component, inputs.group, config.norm_by_std, inputs.counted
        )
    advantages = inputs.whitened(total[:, None] * inputs.mask) * inputs.mask
    return advantages, advantages
