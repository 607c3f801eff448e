"""The reward functions of a run, from the config section `reward`."""

from __future__ import annotations

from pathlib import Path

from rlctl import plugins
from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.rewards.functions import RewardSpec, find_reward


def reward_specs(reward: schema.Reward) -> list[RewardSpec]:
    """Return the custom function if `custom_reward_function.path` is set, else `reward.functions`.

    The settings of a function, `reward.params.<name>`, are validated by its `Params` and become
    keyword arguments. Raises ConfigError for wrong settings or a wrong number of weights.
    """
    custom = reward.custom_reward_function
    if custom.path is not None:
        path = Path(custom.path).expanduser()
        return [RewardSpec(f"{path}:{custom.name}", 1.0, custom.reward_kwargs)]
    weights = reward.weights or (1.0,) * len(reward.functions)
    if len(weights) != len(reward.functions):
        raise ConfigError(
            f"{len(weights)} weights for {len(reward.functions)} reward functions",
            where="reward.weights",
            hint=f"one number per function: {', '.join(reward.functions)}",
        )
    return [
        _with_settings(RewardSpec(function, weight), reward)
        for function, weight in zip(reward.functions, weights, strict=True)
    ]


def _with_settings(spec: RewardSpec, reward: schema.Reward) -> RewardSpec:
    function, name = find_reward(spec.function), spec.name
    settings = reward.params.get(name, {})
    params = plugins.parse_params(function, name, settings, f"reward.params.{name}")
    return RewardSpec(spec.function, spec.weight, params.model_dump() if params else {})
