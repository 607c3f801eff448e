"""GRPO, Dr.GRPO and pass@k training: scores compared within the group of one prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import (
    STD_EPS,
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    normalised,
    on_tokens,
)
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.ops import dense_groups, group_stats


@estimator(needs=Needs.COMPARISON, by_group=True, uses=("norm_by_std",))
def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return (s − μ_g)/(σ_g + 1e-6) on every token: (B, R), twice.

    GRPO, arXiv 2402.03300, section 4.1.2 (outcome supervision). `norm_by_std=False` leaves σ out:
    Dr.GRPO, arXiv 2503.20783. A group of one keeps its score; the papers have no such groups.
    """
    scores = normalised(inputs.scores, inputs.group, config.norm_by_std, inputs.counted)
    return on_tokens(scores, inputs)


@estimator(needs=Needs.COMPARISON, by_group=True, uses=("norm_by_std",))
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
        episodes = inputs.episode[counted].argsort()  # the episode of each number
        advantages = advantages[episodes][inputs.episode]
    return on_tokens(advantages, inputs)
