"""The role `Reward` with reward functions: decodes responses and scores them in the pool."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.runtime.batch import Rollouts, Scores
from rlctl.runtime.rewards.pool import RewardPool

LOG = logging.getLogger(__name__)


class RuleReward:
    """Implementation of `Reward` with functions of the decoded response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pool: RewardPool) -> None:
        self.tokenizer = tokenizer
        self.pool = pool
        self.first_error: str | None = None

    def compute_scores(self, rollouts: Rollouts) -> Scores:
        """Return score, components and failure of each row, (B,) each.

        Failed calls do not raise: they are a warning, and `first_error` keeps the run's first one.
        """
        texts = self.tokenizer.batch_decode(
            [ids.tolist() for ids in rollouts.response_ids.rows()], skip_special_tokens=True
        )
        report = self.pool.score(rollouts.rows, texts)
        self.first_error = self.first_error or report.first_error
        if report.first_error is not None:
            LOG.warning(
                "%d reward calls failed and %d took too long; they score 0. The first: %s",
                report.num_errors,
                report.num_timeouts,
                report.first_error,
            )
        return Scores(
            scores=torch.tensor(report.scores, dtype=torch.float32),
            components={
                name: torch.tensor(values, dtype=torch.float32)
                for name, values in report.components().items()
            },
            failed=torch.tensor(
                [result.error is not None for result in report.results], dtype=torch.bool
            ),
            preds=[result.pred for result in report.results],
        )
