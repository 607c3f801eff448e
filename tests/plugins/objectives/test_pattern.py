"""The reward `pattern`: the form of a response by a regular expression."""

from __future__ import annotations

import pytest

from rlctl.errors import ConfigError
from rlctl.runtime.rewards.functions import Call, RewardSpec
from rlctl.runtime.rewards.loading import load_reward

FORM = r"\S\s*\n#### -?[\d.,]+\s*$"


def spec(**settings: str) -> RewardSpec:
    return RewardSpec("pattern", 1.0, settings)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("2 + 3 = 5\n#### 5", 1.0),
        ("2 + 3 = 5\n\n#### -1,000.5\n", 1.0),
        ("#### 5", 0.0),
        ("2 + 3 = 5 #### 5", 0.0),
        ("2 + 3 = 5\n#### 5 apples", 0.0),
        ("", 0.0),
    ],
)
def test_a_response_with_the_form_scores_one(response: str, score: float) -> None:
    reward = load_reward(spec(pattern=FORM))
    assert reward.function(**reward.arguments([Call("any", response, None, {})])) == score


def test_expressions_are_matched_in_processes_with_a_time_limit() -> None:
    assert not getattr(load_reward(spec(pattern=FORM)).function, "in_process", False)


@pytest.mark.parametrize("settings", [{}, {"pattern": "("}, {"pattern": "a", "other": "b"}])
def test_wrong_settings_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        load_reward(spec(**settings))
