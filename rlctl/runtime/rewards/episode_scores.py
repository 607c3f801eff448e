"""Scores and facts of episodes for the role `Reward`."""

from __future__ import annotations

from dataclasses import replace

from rlctl.data_prep.rows import PromptRow
from rlctl.episodes import Episode
from rlctl.runtime.base.batch import Rollouts
from rlctl.runtime.rewards.functions import CallResult
from rlctl.runtime.rewards.reward_report import RewardReport


def with_episodes(report: RewardReport, rollouts: Rollouts) -> RewardReport:
    """Return the report with the scores of environments, and with the rewards of turns added.

    An episode that failed scores 0.
    """
    assert rollouts.step_rewards is not None, "episodes have rewards of turns"
    results: list[CallResult] = []
    turns = rollouts.step_rewards.sums().tolist()
    for result, episode, reward in zip(report.results, rollouts.episodes, turns, strict=True):
        components = {**result.components, **episode.components}
        result = result._replace(components=components)
        if episode.failed or episode.score is not None:
            result = CallResult(episode.score or 0.0, components, episode.error)
        if not result.error:
            result = result._replace(score=result.score + reward)
        results.append(result)
    return replace(report, results=results)


def with_facts(row: PromptRow, episode: Episode) -> PromptRow:
    """Return the row with verl's facts about an episode in `extra_info`."""
    facts = {
        "num_turns": len(episode.messages) + 1,
        "turn_scores": list(episode.turn_scores),
        "tool_rewards": list(episode.tool_rewards),
    }
    return replace(row, extra_info={**row.extra_info, **facts})
