"""Group policy gradient."""

from __future__ import annotations

from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    normalised,
    on_tokens,
)
from rlctl.runtime.algorithms.base import Needs


@estimator(needs=Needs.COMPARISON, uses=())
def gpg(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return α·(s − μ_g), α = B / max(1, number of rows with s ≠ 0), on tokens: (B, R), twice.

    GPG, arXiv 2504.02546, with F_norm = 1. The paper's α counts the rows of groups whose scores
    differ; verl and rlctl count the rows with a score.
    """
    scores = inputs.scores
    counted = inputs.counted
    alpha = counted.sum() / scores[counted].count_nonzero().clamp(min=1)
    return on_tokens(alpha * normalised(scores, inputs.group, False, counted), inputs)
