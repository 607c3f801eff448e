"""ReMax: the score of a greedy response as the baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    estimator,
    reward_to_go,
)
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.batch import Scored


@estimator(needs=Needs.GREEDY_BASELINE, by_group=True, uses=())
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
    baseline failed has failed, too. If it is kept, its baseline is its score, so that its
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
