"""The role `Reward` with reward functions: decodes responses and scores them in the pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.rows import PromptRow
from rlctl.runtime.batch import Rollouts, Scores
from rlctl.runtime.rewards.pool import RewardPool
from rlctl.runtime.rewards.report import RewardReport, RewardResult
from rlctl.tracking.episodes import Episode

LOG = logging.getLogger(__name__)


class RuleReward:
    """Implementation of `Reward` with functions of the decoded response.

    An episode that its environment has scored keeps that score.
    """

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
        if rollouts.episodes:
            report = self._score_episodes(rollouts, texts)
        else:
            report = self._score(rollouts.rows, texts)
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

    def _score(self, rows: Sequence[PromptRow], texts: Sequence[str]) -> RewardReport:
        """Score responses with the reward functions."""
        report = self.pool.score(rows, texts)
        self.first_error = self.first_error or report.first_error
        if report.first_error is not None:
            LOG.warning(
                "%d reward calls failed and %d took too long; they score 0. The first: %s",
                report.num_errors,
                report.num_timeouts,
                report.first_error,
            )
        return report

    def _score_episodes(self, rollouts: Rollouts, texts: Sequence[str]) -> RewardReport:
        """Score B episodes: those that failed with 0, those without a score by the functions.

        The rewards of their turns are part of the score.
        """
        results = [
            RewardResult(each.score or 0.0, dict(each.components), each.error, None)
            for each in rollouts.episodes
        ]
        unscored = [
            i for i, each in enumerate(rollouts.episodes) if each.score is None and not each.failed
        ]
        report = self._score(
            [_with_episode(rollouts.rows[i], rollouts.episodes[i]) for i in unscored],
            [texts[i] for i in unscored],
        )
        for i, result in zip(unscored, report.results, strict=True):
            results[i] = result
        assert rollouts.step_rewards is not None, "episodes have rewards of turns"
        turns = rollouts.step_rewards.sums().tolist()
        return replace(
            report,
            results=[
                each if each.error else replace(each, score=each.score + reward)
                for each, reward in zip(results, turns, strict=True)
            ],
        )


def _with_episode(row: PromptRow, episode: Episode) -> PromptRow:
    """Return the row with verl's facts about an episode in `extra_info`."""
    rewards = [each.reward for each in episode.messages if each.reward is not None]
    facts = {"num_turns": len(episode.messages) + 1, "turn_scores": rewards}
    return replace(row, extra_info={**row.extra_info, **facts, "tool_rewards": rewards})
