"""Advantages of whole answers, by comparison with the other answers to the same prompt. One number a row, on all its unmasked tokens.

s is the score Σ_t r_t of a row, μ_g and σ_g the mean and the unbiased standard deviation of s over the n rows of its group (0 and 1 for a
group of one). Returns are the advantages themselves. Names and definitions are verl's, so that results can be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.runtime.algorithms.advantages.base import (
    AdvantageInputs,
    AdvantageParams,
    Need,
    estimator,
)
from rlctl.runtime.ops import dense_groups, group_stats, group_sum, masked_whiten

# Keeps a group of equal scores at 0 instead of 0/0. It stands in the denominator of GRPO, where verl has it too.
_STD_EPS = 1e-6


def _on_tokens(row_advantages: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """(B,) -> the same number on every unmasked token of the row, as advantages and as returns."""
    advantages = row_advantages[:, None] * inputs.mask  # (B, R)
    return advantages, advantages


def _normalised(scores: Tensor, group: Tensor, by_std: bool) -> Tensor:
    stats = group_stats(scores, group)
    centred = scores - stats.mean
    return centred / (stats.std + _STD_EPS) if by_std else centred


@estimator("grpo", needs=Need.GROUPS)
def grpo(inputs: AdvantageInputs, params: AdvantageParams) -> tuple[Tensor, Tensor]:
    """(s − μ_g)/(σ_g + 1e-6). GRPO, arXiv 2402.03300, section 4.1.2 (outcome supervision).

    `norm_by_std=False` leaves σ out: Dr.GRPO, arXiv 2503.20783. A group of one keeps its score; the papers have no such groups.
    """
    return _on_tokens(_normalised(inputs.scores, inputs.group, params.norm_by_std), inputs)


@estimator("rloo", needs=Need.GROUPS)
def rloo(inputs: AdvantageInputs, params: AdvantageParams) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """s minus the mean of the *other* rows of the group, which is n/(n−1)·(s − μ_g). RLOO, arXiv 2402.14740.

    A group of one keeps its score; the paper has no such groups.
    """
    stats = group_stats(inputs.scores, inputs.group)
    leave_one_out = stats.size / (stats.size - 1).clamp(min=1)
    return _on_tokens((inputs.scores - stats.mean) * leave_one_out, inputs)


@estimator("reinforce_plus_plus_baseline", needs=Need.GROUPS)
def reinforce_plus_plus_baseline(
    inputs: AdvantageInputs, params: AdvantageParams
) -> tuple[Tensor, Tensor]:
    """s − μ_g on every token, whitened over all tokens of the global batch. REINFORCE++ with baseline, arXiv 2501.03262.

    Long answers weigh more in the moments, because they have more tokens.
    """
    centred, _ = _on_tokens(_normalised(inputs.scores, inputs.group, by_std=False), inputs)
    advantages = masked_whiten(centred, inputs.mask) * inputs.mask
    return advantages, advantages


@estimator("opo", needs=Need.GROUPS)
def opo(inputs: AdvantageInputs, params: AdvantageParams) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """s − Σ len·s / Σ len over the group: the optimal baseline where gradients grow with the length. OPO, arXiv 2505.23585.

    A group of one has a baseline of 0, not its own score.
    """
    dense, num_groups = dense_groups(inputs.group)
    lengths = inputs.mask.sum(-1)  # (B,)
    weight = group_sum(lengths, dense, num_groups).clamp(min=1.0)
    baseline = group_sum(lengths * inputs.scores, dense, num_groups) / weight
    baseline = baseline.masked_fill(torch.bincount(dense, minlength=num_groups) == 1, 0.0)
    return _on_tokens(inputs.scores - baseline[dense], inputs)


@estimator("gpg", needs=Need.GROUPS)
def gpg(inputs: AdvantageInputs, params: AdvantageParams) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """α·(s − μ_g), α = B / max(1, number of rows with s ≠ 0). GPG, arXiv 2504.02546.

    The paper's α counts the rows of groups that carry a signal; verl counts rows with a score, and so do we. F_norm = 1.
    """
    scores = inputs.scores
    alpha = len(scores) / scores.count_nonzero().clamp(min=1)
    return _on_tokens(alpha * _normalised(scores, inputs.group, by_std=False), inputs)


@estimator("grpo_passk", needs=Need.GROUPS)
def grpo_passk(inputs: AdvantageInputs, params: AdvantageParams) -> tuple[Tensor, Tensor]:
    """The best row of a group gets best − second best (÷ (σ_g + 1e-6) when normalising), the others 0. arXiv 2503.19595.

    `ValueError` for a group of one, which has no second best.
    """
    scores = inputs.scores
    dense, num_groups = dense_groups(inputs.group)
    size = torch.bincount(dense, minlength=num_groups)
    if bool((size < 2).any()):
        raise ValueError(
            "pass@k needs at least two answers to each prompt; raise actor_rollout_ref.rollout.n"
        )
    by_score = scores.argsort(descending=True, stable=True)
    order = by_score[dense[by_score].argsort(stable=True)]  # by group, the best row of each first
    first = size.cumsum(0) - size  # (G,)
    best = order[first]
    lead = scores[best] - scores[order[first + 1]]
    if params.norm_by_std:
        lead = lead / (group_stats(scores, inputs.group).std[best] + _STD_EPS)
    return _on_tokens(torch.zeros_like(scores).index_put((best,), lead), inputs)


@estimator("gdpo", needs=Need.GROUPS | Need.COMPONENTS)
def gdpo(inputs: AdvantageInputs, params: AdvantageParams) -> tuple[Tensor, Tensor]:
    """GRPO for each component of the reward apart, their weighted sum, whitened over the batch. GDPO, arXiv 2601.05242.

    So a component with small numbers is not drowned by one with large ones. Where there are weights, components without
    one do not count. `ConfigError` for a weight whose component is not there.
    """
    if missing := sorted(set(params.weights) - set(inputs.components)):
        there = ", ".join(sorted(inputs.components)) or "none"
        raise ConfigError(
            f"the reward has no component {', '.join(missing)}: it has {there}",
            where="algorithm.gdpo_reward_keys",
        )
    weights = params.weights or dict.fromkeys(inputs.components, 1.0)
    total = torch.zeros_like(inputs.scores)
    for name, weight in weights.items():
        total = total + weight * _normalised(
            inputs.components[name].to(total), inputs.group, params.norm_by_std
        )
    advantages = masked_whiten(total[:, None] * inputs.mask, inputs.mask) * inputs.mask
    return advantages, advantages
