"""ReMax: the score of a greedy response as the baseline."""

from __future__ import annotations

from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    reward_to_go,
)
from rlctl.runtime.algorithms.base import Needs


@estimator(needs=Needs.GREEDY_BASELINE, by_group=True)
def remax(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return the reward to go minus the greedy response's score, and the former: (B, R) each.

    ReMax, arXiv 2310.10505. Undiscounted.
    """
    returns = reward_to_go(inputs)
    return returns - inputs.given("greedy_scores")[:, None] * inputs.mask, returns
