"""The reward of a model: the conversations that it reads, and its scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.episodes import Episode, Message
from rlctl.errors import RlctlError
from rlctl.plugins.objectives.model_reward import ModelReward, Scale
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.advantages.remax import with_baseline
from rlctl.runtime.base.batch import Ragged, Rollouts, Scores
from rlctl.runtime.base.budget import OomRetry
from rlctl.runtime.base.roles import Reward, RewardModel
from rlctl.runtime.data.conversations import Conversations
from rlctl.runtime.data.tokenizer import render_prompt
from rlctl.runtime.rewards.functions import RewardSpec
from rlctl.runtime.rewards.reward_pool import RewardPool
from rlctl.runtime.rewards.reward_report import exceeds
from rlctl.runtime.rewards.role import RuleReward
from tests.models import write_tiny_model

TURNS = (
    Message("assistant", "north", trained=True),
    Message("user", "a wall", trained=False),
    Message("assistant", "south", trained=True),
    Message("user", "bye", trained=False),
)


class Model(RewardModel):
    """Reward model with given scores, which keeps the texts that it reads."""

    def __init__(self, conversations: Conversations, *scores: float) -> None:
        self.tokenizer, self.scores = conversations.tokenizer, list(scores)
        self.seen: list[str] = []

    def compute_rewards(self, batch: Rollouts) -> Ragged:
        parts = zip(batch.prompt_ids.rows(), batch.response_ids.rows(), strict=True)
        self.seen.extend(str(self.tokenizer.decode(torch.cat(each))) for each in parts)
        scores, self.scores = self.scores[: len(batch)], self.scores[len(batch) :]
        return Ragged(torch.tensor(scores), torch.ones(len(batch), dtype=torch.int64))

    def pop_oom_retries(self) -> list[OomRetry]:
        return []


class Rules(Reward):
    """Reward functions that give 3 to each response."""

    def compute_scores(self, rollouts: Rollouts, validate: bool = False) -> Scores:
        size = len(rollouts)
        failed = torch.zeros(size, dtype=torch.bool)
        return Scores(torch.full((size,), 3.0), {}, failed, [None] * size)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    settings = compose("ppo_reward_model", []).config.reward.reward_model
    model = settings.model.model_copy(update={"path": str(folder)})
    return Conversations.from_config(settings.model_copy(update={"model": model}))


def rollouts(size: int, *episodes: Episode) -> Rollouts:
    ids = Ragged.from_rows([[5]] * size, dtype=torch.int64)
    return Rollouts(
        prompt_ids=ids,
        group=torch.arange(size),
        rows=[PromptRow("game", [{"role": "user", "content": "play"}], None)] * size,
        response_ids=ids,
        response_mask=ids.like(torch.ones(size)),
        rollout_log_probs=ids.like(torch.zeros(size)),
        finish=["stop"] * size,
        episodes=list(episodes),
        step_rewards=ids.like(torch.full((size,), 2.0)) if episodes else None,
    )


def scorer(conversations: Conversations, model: Model, share: float = 1.0) -> ModelReward:
    words = conversations.tokenizer, conversations
    return ModelReward(Rules(), model, *words, 1.0, 0.0, Scale(), share)


def test_an_episode_is_scored_from_its_opening_to_the_last_turn(
    conversations: Conversations,
) -> None:
    opening = (Message("user", "a map", trained=False),)
    batch = rollouts(2, Episode("done", TURNS, opening=opening), Episode("done", TURNS[:1]))
    model = Model(conversations, 1.0, 2.0)
    reward = scorer(conversations, model)
    reward.scale = None
    assert reward.compute_scores(batch).scores.tolist() == [1.0, 2.0]
    words = [
        [text for text in ("play", "map", "north", "wall", "south", "bye") if text in each]
        for each in model.seen
    ]
    assert words == [["map", "north", "wall", "south"], ["play", "north"]]


def test_a_response_that_continues_a_message_is_scored_as_one(
    conversations: Conversations,
) -> None:
    begun = [{"role": "user", "content": "play"}, {"role": "assistant", "content": "I go "}]
    text = conversations.tokenizer.decode([5])
    whole = render_prompt(
        conversations.tokenizer,
        [begun[0], {"role": "assistant", "content": f"I go {text}"}],
        add_generation_prompt=False,
    )
    turns = (Message("assistant", text, trained=True), *TURNS[1:2])
    opening = tuple(Message(turn["role"], turn["content"], False) for turn in begun)
    for episodes in ((), (Episode("done", turns, opening=opening),)):
        batch = rollouts(1, *episodes)
        batch.rows[0] = PromptRow("game", begun, None)
        model = Model(conversations, 1.0)
        scorer(conversations, model).compute_scores(batch)
        assert model.seen == [whole]


def test_rewards_of_turns_have_the_weight_of_the_rules(conversations: Conversations) -> None:
    batch = rollouts(1, Episode("done", TURNS))
    reward = scorer(conversations, Model(conversations, 1.0, 1.0))
    for weight in (0.0, 0.5):
        reward.rule_weight = weight
        scored = reward.compute_scores(batch).to_scored(batch)
        assert scored.step_rewards is not None
        assert scored.step_rewards.values.tolist() == [2.0 * weight]


def test_scores_that_are_no_finite_numbers_have_failed_and_enter_no_moment(
    conversations: Conversations,
) -> None:
    model = Model(conversations, 1.0, torch.inf, 3.0, torch.nan)
    reward = scorer(conversations, model)
    scores = reward.compute_scores(rollouts(4))
    assert scores.failed.tolist() == [False, True, False, True]
    assert scores.scores.tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0], abs=1e-5)
    assert scores.components["reward_model"].isnan().tolist() == scores.failed.tolist()
    assert scores.components["rule"].tolist() == [3.0] * 4
    assert reward.state_dict() == {"count": 2.0, "mean": 2.0, "squares": 2.0}


def test_too_many_failures_end_the_run_before_any_moment_changes(
    conversations: Conversations,
) -> None:
    reward = scorer(conversations, Model(conversations, 1.0, torch.inf, torch.inf), share=0.3)
    with pytest.raises(RlctlError, match="2 of 3 responses failed") as caught:
        reward.compute_scores(rollouts(3))
    assert caught.value.problems[0].where == "reward.max_failed_share=0.3"


def test_a_greedy_baseline_has_the_scale_of_the_samples(conversations: Conversations) -> None:
    """The second baseline failed: its response has failed, and its advantage is 0."""
    reward = scorer(conversations, Model(conversations, 0.0, 4.0, 6.0, torch.nan))
    samples = rollouts(2)
    scored = reward.compute_scores(samples).to_scored(samples)
    moments = reward.state_dict()
    greedy = reward.compute_scores(samples, validate=True).to_scored(samples)
    assert reward.state_dict() == moments
    both = with_baseline(scored, greedy, lambda scores, _: scores)
    assert both.greedy_scores is not None
    assert both.greedy_scores.tolist() == pytest.approx([2.0, float(scored.scores[1])], abs=1e-5)
    assert both.failed.tolist() == [False, True]


def test_functions_get_the_scores_of_turns_and_tools_and_keep_those_of_tools(
    conversations: Conversations, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(extra_info, **_):\n"
        "    turns, tools = (sum(extra_info[name]) for name in ('turn_scores', 'tool_rewards'))\n"
        "    return {'score': turns, 'tools': tools, 'turns': extra_info['num_turns']}\n"
    )
    played = Episode(
        "done", TURNS, components={"calc": 7.0}, turn_scores=(1.0, 0.5), tool_rewards=(0.25,)
    )
    batch = rollouts(2, played, Episode("timeout", TURNS, error="too long"))
    spec = RewardSpec(f"{tmp_path}/mine.py:score", 1.0)
    with RewardPool([spec], timeout_s=9) as pool:
        scores = RuleReward(conversations.tokenizer, pool).compute_scores(batch)
    assert scores.scores.tolist() == [3.5, 0.0]  # 2 are rewards of turns
    assert scores.failed.tolist() == [False, True]
    first = {name: float(values[0]) for name, values in scores.components.items()}
    assert first == {"tools": 0.25, "turns": 5.0, "calc": 7.0}
    assert all(values[1].isnan() for values in scores.components.values())


def test_a_single_failure_of_a_small_batch_is_within_each_budget() -> None:
    assert [exceeds(1, 3, share) for share in (0.0, 0.1, 0.5)] == [True, False, False]
    assert [exceeds(number, 30, 0.1) for number in (3, 4)] == [False, True]


def test_a_run_in_which_every_reward_failed_is_an_error(
    conversations: Conversations, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(solution_str, **_):\n    raise OSError('full')\n")
    spec = RewardSpec(f"{tmp_path}/mine.py:score", 1.0)
    with RewardPool([spec], timeout_s=9) as pool:
        reward = RuleReward(conversations.tokenizer, pool)
        reward.check_run()
        reward.compute_scores(rollouts(1))
    with pytest.raises(RlctlError, match=r"the reward of all responses.*full"):
        reward.check_run()
