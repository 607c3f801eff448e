"""The reward of a model: the conversations that it reads."""

from __future__ import annotations

from pathlib import Path

import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.recipes.compose import compose
from rlctl.runtime.batch import Ragged, Rollouts, Scores
from rlctl.runtime.budget import OomRetry
from rlctl.runtime.data.conversations import Conversations
from rlctl.runtime.rewards.model_reward import ModelReward
from rlctl.runtime.roles import Reward, RewardModel
from rlctl.tracking.episodes import Episode, Message
from tests.models import write_tiny_model


def test_an_episode_is_scored_with_the_opening_of_its_environment(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    settings = compose("ppo_reward_model", []).config.reward.reward_model
    model = settings.model.model_copy(update={"path": str(tmp_path)})
    conversations = Conversations.from_config(settings.model_copy(update={"model": model}))
    opening = (Message("user", "a map", trained=False),)
    turns = (
        Message("assistant", "north", trained=True),
        Message("user", "a wall", trained=False),
        Message("assistant", "south", trained=True),
    )
    ids = Ragged.from_rows([[5], [5]], dtype=torch.int64)
    rollouts = Rollouts(
        prompt_ids=ids,
        group=torch.arange(2),
        rows=[PromptRow("game", [{"role": "user", "content": "play"}], None)] * 2,
        response_ids=ids,
        response_mask=ids.like(torch.ones(2)),
        rollout_log_probs=ids.like(torch.zeros(2)),
        finish=["stop"] * 2,
        episodes=[Episode("done", turns, opening=opening), Episode("done", turns[:1])],
    )
    seen: list[str] = []

    class Model(RewardModel):
        def compute_rewards(self, batch: Rollouts) -> Ragged:
            parts = zip(batch.prompt_ids.rows(), batch.response_ids.rows(), strict=True)
            seen.extend(str(conversations.tokenizer.decode(torch.cat(each))) for each in parts)
            return Ragged(torch.tensor([1.0, 2.0]), torch.ones(2, dtype=torch.int64))

        def pop_oom_retries(self) -> list[OomRetry]:
            return []

    class NoScore(Reward):
        def compute_scores(self, rollouts: Rollouts, validate: bool = False) -> Scores:
            return Scores(torch.zeros(2), {}, torch.zeros(2, dtype=torch.bool), [None] * 2)

    scorer = ModelReward(
        NoScore(), Model(), conversations.tokenizer, conversations, 1.0, 0.0, scale=None
    )
    assert scorer.compute_scores(rollouts).scores.tolist() == [1.0, 2.0]
    words = [
        [text for text in ("play", "map", "north", "wall", "south") if text in each]
        for each in seen
    ]
    assert words == [["map", "north", "wall", "south"], ["play", "north"]]
