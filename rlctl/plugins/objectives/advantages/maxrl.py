"""MaxRL: maximum likelihood of a correct response."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import (
    STD_EPS,
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    on_tokens,
)
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.ops import group_stats


@estimator(needs=Needs.COMPARISON, by_group=True, uses=())
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
