"""REINFORCE leave-one-out."""

from __future__ import annotations

from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    on_tokens,
)
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.ops import group_stats


@estimator(needs=Needs.COMPARISON, by_group=True, uses=())
def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return s minus the mean of the *other* rows of the group, on every token: (B, R), twice.

    RLOO, arXiv 2402.14740. Equal to n/(n−1)·(s − μ_g). A group of one keeps its score; the paper
    has no such groups.
    """
    stats = group_stats(inputs.scores, inputs.group, inputs.counted)
    leave_one_out = stats.size / (stats.size - 1).clamp(min=1)
    return on_tokens((inputs.scores - stats.mean) * leave_one_out, inputs)
