"""Section `reward`: scoring of responses."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rlctl.recipes.schema.fields import Count, Floats, PositiveFloat, Section, Text, Texts


class CustomRewardFunction(Section):
    """A reward function in a Python file."""

    path: Text | None = Field(
        description="Python file with a reward function; null = use reward.functions"
    )
    name: Text = Field(description="name of the function in that file")
    reward_kwargs: dict[str, Any] = Field(description="extra keyword arguments of the function")


class Reward(Section):
    """Settings of `reward`."""

    functions: Texts = Field(
        description="reward functions: names, `module:function` or `file.py:function`"
    )
    weights: Floats | None = Field(description="one weight per function; null = 1 each")
    params: dict[str, dict[str, Any]] = Field(
        description="settings per reward function, such as {gsm8k: {method: flexible}}"
    )
    timeout_s: PositiveFloat = Field(
        description="timeout of one call in seconds; a response that exceeds it scores 0"
    )
    num_processes: Count | None = Field(description="scoring processes; null = one per core")
    custom_reward_function: CustomRewardFunction
