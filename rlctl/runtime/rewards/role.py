"""The role `Reward` with reward functions: decodes responses and scores them in the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlctl.errors import RlctlError
from rlctl.runtime.base.batch import Prompts, Rollouts, Scores
from rlctl.runtime.base.clock import timed
from rlctl.runtime.base.roles import Reward
from rlctl.runtime.rewards.functions import TIMEOUT_HINT, CallResult
from rlctl.runtime.rewards.reward_pool import RewardPool, Scoring
from rlctl.runtime.rewards.reward_report import RewardReport, exceeds
from rlctl.text import plural

if TYPE_CHECKING:
    from rlctl.episodes import Episode

LOG = logging.getLogger(__name__)


RULE = "rule"  # component: the score of the functions, if a model also scores


@dataclass(eq=False)
class RuleReward(Reward):
    """Scores by functions of the decoded response, without state.

    An episode that its environment has scored keeps that score. `max_failed_share` limits the share
    of a batch's responses whose calls fail.
    """

    tokenizer: PreTrainedTokenizerBase
    pool: RewardPool
    max_failed_share: float = 1.0
    max_failed_steps: int | None = None  # in a row, in which all responses fail
    on_first_error: Callable[[str], object] = lambda _: None
    first_error: str | None = None
    last_error: str | None = None  # the first one of the latest batch with errors
    num_timeouts: int = 0  # of calls for training since `pop_timeouts`
    has_succeeded: bool = False  # for any response
    _early: tuple[Rollouts, Scoring] | None = None  # see `EarlyScoring`

    def scored_rows(self, rollouts: Rollouts) -> Tensor:
        """Return a mask (B,) of the rows that functions or environments score."""
        scored = torch.tensor(
            [
                any(spec.scores(row.data_source) for spec in self.pool.functions)
                for row in rollouts.rows
            ]
        )
        if rollouts.episodes:
            scored |= torch.tensor([episode.score is not None for episode in rollouts.episodes])
        return scored

    def expect(self, rollouts: Rollouts, scoring: Scoring) -> None:
        """Use `scoring`, which has all rows, when `compute_scores` is called with `rollouts`."""
        self._early = (rollouts, scoring)

    @timed("reward")
    def compute_scores(self, rollouts: Rollouts, validate: bool = False) -> Scores:
        """Return score, components and failure of each row, (B,) each.

        Failed calls do not raise: they are a warning, and `first_error` keeps the run's first one.
        Raises RlctlError if too many fail.
        """
        report = self._score(rollouts)
        if not validate:
            self.num_timeouts += report.num_timeouts
        if rollouts.episodes:
            from rlctl.runtime.rewards.episode_scores import with_episodes

            report = with_episodes(report, rollouts)
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

    def pop_timeouts(self) -> int:
        """Return the number of calls for training that took too long since the last call."""
        number = self.num_timeouts
        self.num_timeouts = 0
        return number

    def check_run(self) -> None:
        """Raise RlctlError if the reward of every response of the run failed."""
        if self.first_error is not None and not self.has_succeeded:
            raise RlctlError(
                f"the reward of all responses of this run failed; the first: {self.first_error}",
                hint="`rlctl reward test` scores stored responses",
            )

    def begin(self, prompts: Prompts) -> EarlyScoring:
        """Begin to score the responses to B `prompts`, one response each, as they are finished."""
        return EarlyScoring(self, prompts)

    def _score(self, rollouts: Rollouts) -> RewardReport:
        """Score the rows that need the reward functions; the others have no score."""
        early = self._early
        self._early = None
        if not self.pool.functions:  # environments or a reward model score alone
            nothing = CallResult(0.0, {})
            return RewardReport([nothing] * len(rollouts), 0, 0, None)
        if early is not None and early[0] is rollouts:
            return self._finish(early[1])
        scoring = self.begin(rollouts)
        responses = rollouts.response_ids.rows()
        for row, ids in enumerate(responses):
            scoring.add(row, ids, rollouts.episodes[row] if rollouts.episodes else None)
        return self._finish(scoring.scoring)

    def _finish(self, scoring: Scoring) -> RewardReport:
        try:
            report = scoring.finish()
        except BaseException:
            self.pool.close()  # a worker cannot be used again while a call is in progress
            raise
        first = report.first_error
        if first is not None and report.first_timed_out:
            first = f"{first} ({TIMEOUT_HINT})"
        self.last_error = first or self.last_error
        if first is not None and self.first_error is None:
            self.first_error = first
            self.on_first_error(first)
        self.has_succeeded |= any(result.error is None for result in report.results)
        if first is None:
            return report
        num_failed = sum(result.error is not None for result in report.results)
        LOG.warning(
            "%s failed and %d took too long, for %d of %d responses; the first: %s",
            plural(report.num_errors, "reward call"),
            report.num_timeouts,
            num_failed,
            len(report.results),
            first,
        )
        num_rows = len(report.results)
        reason = f"the first: {first}"
        check_failed_share(num_failed, num_rows, self.max_failed_share, reason)
        return report


def check_failed_share(num_failed: int, num_rows: int, share: float, reason: str) -> None:
    """Raise RlctlError if the rewards of too many responses failed."""
    if exceeds(num_failed, num_rows, share):
        raise RlctlError(
            f"the reward of {num_failed} of {num_rows} responses failed; {reason}",
            where=f"reward.max_failed_share={share:g}",
            hint="`rlctl reward test` scores stored responses",
        )


class EarlyScoring:
    """Scoring of a batch whose responses come one by one, in any order.

    The scores are the same as in `RuleReward.compute_scores` without it.
    """

    def __init__(self, reward: RuleReward, prompts: Prompts) -> None:
        self.scoring = reward.pool.open(prompts.group.tolist())
        self._reward = reward
        self._rows = prompts.rows

    def add(self, row: int, response_ids: Tensor, episode: Episode | None = None) -> None:
        """Score the response (T,) int64 of a row, unless its episode failed or has a score."""
        if episode is not None and (episode.failed or episode.score is not None):
            self.scoring.skip(row)
            return
        prompt = self._rows[row]
        if episode is not None:
            from rlctl.runtime.rewards.episode_scores import with_facts

            prompt = with_facts(prompt, episode)
        text = self._reward.tokenizer.decode(response_ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str), "one row is decoded"
        self.scoring.add(row, prompt, text)

    def finish(self, rollouts: Rollouts) -> None:
        """Use the scores when `compute_scores` gets `rollouts`, which has the rows added."""
        self._reward.expect(rollouts, self.scoring)
