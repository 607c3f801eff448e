"""Sections `multi_turn` and `agent` of the rollout: episodes with tools and environments."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import (
    Count,
    Fraction,
    PositiveFloat,
    ProcessLimits,
    Section,
    Text,
    Texts,
)


class MultiTurn(Section):
    """Responses of several turns, between which tools or an environment reply."""

    enable: bool = Field(description="let tools or an environment reply to the policy's turns")
    generator: Text = Field(description="generator of the responses: episodes, or `module:Name`")
    max_assistant_turns: Count | None = Field(
        description="turns that the policy may write in an episode; null = no limit"
    )
    max_user_turns: Count | None = Field(
        description="replies of tools or the environment in an episode; null = no limit"
    )
    max_parallel_calls: Count = Field(
        description="tool calls that a turn may contain; further ones get an error as result"
    )
    max_tool_response_length: Count = Field(
        description="characters of a tool's result; longer ones are shortened"
    )
    tool_response_truncate_side: Literal["left", "middle", "right"] = Field(
        description="part of a long result to keep: left = its beginning, right = its end, "
        "middle = half of each, as in verl"
    )
    tool_config_path: Text | None = Field(description="YAML file of tools, as in verl")
    function_tool_path: Text | None = Field(
        description="Python file of functions that are tools, as in verl"
    )
    interaction_config_path: Text | None = Field(
        description="YAML file of simulated users, as in verl"
    )
    format: Text = Field(
        description="parser of tool calls: hermes, qwen3_coder, llama3_json, … or `module:Name`"
    )


class AgentTimeouts(Section):
    """Deadlines of an episode, in seconds."""

    call_s: PositiveFloat = Field(description="timeout of one tool call, in seconds")
    turn_s: PositiveFloat = Field(
        description="timeout of the environment's reply to a turn, with all its calls, in seconds"
    )
    episode_s: PositiveFloat = Field(
        description="timeout of an episode, generation included, in seconds"
    )


class Agent(Section):
    """Environments of episodes and the processes that run them."""

    environment: Text | None = Field(
        description="environment: a name or `module:Class`; null = the tools of multi_turn"
    )
    params: dict[str, Any] = Field(
        description="settings of the environment, or of a program that is a plug-in"
    )
    program: Text | None = Field(
        description="function that plays the episodes with an OpenAI client, instead of an "
        "environment: `module:function`, `path.py:function` or the name of a plug-in"
    )
    default_agent_loop: Literal["tool_agent", "single_turn_agent"] = Field(
        description="kind of the episodes of rows without agent_name: tool_agent = with tools or "
        "the environment, single_turn_agent = one turn"
    )
    schedule: Literal["auto", "fixed", "eager"] = Field(
        description="fixed = turns join the engine at set steps, so that equal runs are equal to "
        "the bit; eager = at once; auto = fixed on a CPU"
    )
    python: Text | None = Field(
        description="interpreter of the processes, for packages whose versions rlctl cannot have; "
        "it needs pydantic; null = the one that runs rlctl"
    )
    num_workers: Count | None = Field(
        description="processes that run environments and tools; null = one per core"
    )
    max_failed_share: Fraction = Field(
        description="share of a step's episodes that may fail; the run ends above it"
    )
    env: Texts = Field(
        description="environment variables that tools and environments may read, besides the "
        "usual ones"
    )
    limits: ProcessLimits
    timeouts: AgentTimeouts
