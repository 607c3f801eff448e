"""On-policy RL with the optimal reward baseline (OPO)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    on_tokens,
)
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.ops import dense_groups, group_sum


@estimator(needs=Needs.COMPARISON, by_group=True, uses=())
def opo(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return s − Σ len·s / Σ len over the group, on every token: (B, R), twice.

    OPO, arXiv 2505.23585: the optimal baseline if gradients grow with the length. A group of one
    episode has a baseline of 0, not its score.
    """
    dense, num_groups = dense_groups(inputs.group)
    lengths = inputs.mask.sum(-1)  # (B,)
    weight = group_sum(lengths, dense, num_groups).clamp(min=1.0)
    baseline = group_sum(lengths * inputs.scores, dense, num_groups) / weight
    size = torch.bincount(dense[inputs.counted], minlength=num_groups)
    baseline = baseline.masked_fill(size == 1, 0.0)
    return on_tokens(inputs.scores - baseline[dense], inputs)
