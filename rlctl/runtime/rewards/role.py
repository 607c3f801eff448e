"""The role `Reward`: decodes the answers on the controller and has them scored."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.runtime.batch import Rollouts, Scores
from rlctl.runtime.rewards.pool import RewardPool


class RuleReward:
    """Implements `Reward` with functions of the decoded answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pool: RewardPool) -> None:
        self.tokenizer = tokenizer
        self.pool = pool
        self.first_error: str | None = None

    def compute_scores(self, rollouts: Rollouts) -> Scores:
        """See `Reward`. The first error of a run is kept in `first_error`: the functions fail quietly, one answer at a time."""
        texts = self.tokenizer.batch_decode(
            [ids.tolist() for ids in rollouts.response_ids.rows()], skip_special_tokens=True
        )
        report = self.pool.score(rollouts.rows, texts)
        self.first_error = self.first_error or report.first_error
        return Scores(
            scores=torch.tensor(report.scores, dtype=torch.float32),
            components={
                name: torch.tensor(values, dtype=torch.float32)
                for name, values in report.components().items()
            },
            failed=torch.tensor(
                [result.error is not None for result in report.results], dtype=torch.bool
            ),
        )
