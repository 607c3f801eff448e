"""`reward`: how answers are scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import Count, Floats, PositiveFloat, Section, Text, Texts


class GSM8K(Section):
    method: Literal["strict", "flexible", "verl_strict", "verl_flexible"] = Field(
        description="strict = the last `#### number`, flexible = the last number; verl_* compare strings as verl does"
    )


class CustomRewardFunction(Section):
    path: Text | None = Field(
        description="Python file of your reward function; null = reward.functions"
    )
    name: Text = Field(description="name of the function in that file")
    reward_kwargs: dict[str, Any] = Field(description="further keyword arguments of the function")


class RewardModel(Section):
    enable: bool = Field(description="score with a reward model too")
    path: Text | None = Field(description="folder or hub name of the reward model")


class Reward(Section):
    functions: Texts = Field(description="scorers: names, `module:function` or `file.py:function`")
    weights: Floats | None = Field(description="one weight a scorer; null = 1 each")
    params: dict[str, dict[str, Any]] = Field(
        description="settings of each reward function by its name, such as {gsm8k: {method: flexible}}"
    )
    timeout_s: PositiveFloat = Field(
        description="seconds that one call may take; a later answer scores 0"
    )
    num_processes: Count | None = Field(description="processes that score; null = one a core")
    gsm8k: GSM8K
    custom_reward_function: CustomRewardFunction
    reward_model: RewardModel
