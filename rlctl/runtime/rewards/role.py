"""The role `Reward`: decodes the answers on the controller and has them scored."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.batch import Rollouts, Scores
from rlctl.runtime.rewards.functions import RewardSpec
from rlctl.runtime.rewards.pool import RewardPool


class RuleReward:
    """Implements `Reward` with functions of the decoded answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pool: RewardPool) -> None:
        self.tokenizer = tokenizer
        self.pool = pool
        self.first_error: str | None = None

    def compute_scores(self, rollouts: Rollouts) -> Scores:
        """See `Reward`. The first error of a run is kept in `first_error`: the functions fail quietly, one answer at a time."""
        texts = self.tokenizer.batch_decode([ids.tolist() for ids in rollouts.response_ids.rows()], skip_special_tokens=True)
        report = self.pool.score(rollouts.rows, texts)
        self.first_error = self.first_error or report.first_error
        return Scores(
            scores=torch.tensor(report.scores, dtype=torch.float32),
            components={name: torch.tensor(values, dtype=torch.float32) for name, values in report.components().items()},
            failed=torch.tensor([result.error is not None for result in report.results], dtype=torch.bool),
        )


def reward_specs(reward: schema.Reward) -> list[RewardSpec]:
    """The functions of `reward.*`: the user's own where `custom_reward_function.path` is set, else those of `reward.functions`."""
    custom = reward.custom_reward_function
    if custom.path is not None:
        return [RewardSpec(f"{Path(custom.path).expanduser()}:{custom.name}", 1.0, custom.reward_kwargs)]
    weights = reward.weights or (1.0,) * len(reward.functions)
    if len(weights) != len(reward.functions):
        raise ConfigError(
            f"{len(weights)} weights for {len(reward.functions)} reward functions",
            where="reward.weights",
            hint=f"one number a function: {', '.join(reward.functions)}",
        )
    options = {"gsm8k": reward.gsm8k.model_dump()}
    return [RewardSpec(name, weight, options.get(name) or {}) for name, weight in zip(reward.functions, weights, strict=True)]
