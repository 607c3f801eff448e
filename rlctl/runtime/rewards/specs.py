"""From the section `reward` of a configuration to the functions that score."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.rewards.functions import RewardSpec


def reward_specs(reward: schema.Reward) -> list[RewardSpec]:
    """The functions of `reward.*`: the user's own where `custom_reward_function.path` is set, else those of `reward.functions`."""
    custom = reward.custom_reward_function
    if custom.path is not None:
        return [
            RewardSpec(f"{Path(custom.path).expanduser()}:{custom.name}", 1.0, custom.reward_kwargs)
        ]
    weights = reward.weights or (1.0,) * len(reward.functions)
    if len(weights) != len(reward.functions):
        raise ConfigError(
            f"{len(weights)} weights for {len(reward.functions)} reward functions",
            where="reward.weights",
            hint=f"one number a function: {', '.join(reward.functions)}",
        )
    options = {"gsm8k": reward.gsm8k.model_dump()}
    return [
        RewardSpec(name, weight, options.get(name) or {})
        for name, weight in zip(reward.functions, weights, strict=True)
    ]
