"""Section `reward`: scoring of responses."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rlctl.recipes.schema.fields import Count, Floats, PositiveFloat, Section, Text, Texts


class CustomRewardFunction(Section):
    """A reward function in a Python file."""

    path: Text | None = Field(
        description="Python file with a reward function; null = use reward.functions"
    )
    name: Text = Field(description="name of the function in that file")
    reward_kwargs: dict[str, Any] = Field(description="extra keyword arguments of the function")


class ProcessLimits(Section):
    """Limits of each process that runs rewards, tools or environments."""

    memory_gb: PositiveFloat | None = Field(
        description="memory in GiB; null = the machine's memory / their number"
    )
    file_gb: PositiveFloat = Field(description="size of a file that it writes, in GiB")
    open_files: Annotated[int, Field(ge=16)] = Field(description="open files and sockets")


class Reward(Section):
    """Settings of `reward`."""

    functions: Texts | None = Field(
        description="reward functions for all rows: names, `module:function` or "
        "`file.py:function`; null = the scorer of each row's data source"
    )
    weights: Floats | None = Field(description="one weight per function; null = 1 each")
    params: dict[str, dict[str, Any]] = Field(
        description="settings per reward function, such as {gsm8k: {method: flexible}}"
    )
    timeout_s: PositiveFloat = Field(
        description="timeout of one call, and of the first import of reward code, in seconds; a "
        "response that exceeds it scores 0"
    )
    num_processes: Count | None = Field(description="scoring processes; null = one per core")
    env: Texts = Field(
        description="environment variables for reward code besides the usual ones, such as "
        "OPENAI_API_KEY"
    )
    limits: ProcessLimits
    custom_reward_function: CustomRewardFunction
