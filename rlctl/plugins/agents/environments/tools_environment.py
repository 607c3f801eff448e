"""Environment of tools, and of simulated users who reply to turns without calls."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from rlctl import plugins
from rlctl.plugins.agents.environments.protocol import Row, Step
from rlctl.plugins.agents.environments.tool import EpisodeInfo
from rlctl.plugins.agents.environments.tool_calls import CallParams, ToolCalls, close_all
from rlctl.plugins.agents.environments.toolset import ToolSet, load_toolset
from rlctl.plugins.agents.environments.verl.tools import (
    InteractionSession,
    chosen,
    interactions_of_config,
)
from rlctl.runtime.serving.chat import Message, ToolSchema, Turn, to_call


class ToolsParams(CallParams):
    """Settings of the tools environment. Keys of verl have verl's names."""

    tools: tuple[str, ...] = Field((), description="tools: names, module:name or path.py:name")
    tool_params: dict[str, dict[str, Any]] = Field({}, description="settings of tools by name")
    function_tool_path: str | None = Field(None, description="file with @function_tool functions")
    tool_config_path: str | None = Field(None, description="tool configuration of verl (YAML)")
    mcp_config_path: str | None = Field(
        None, description="JSON file of MCP servers, with the key mcpServers"
    )
    interaction_config_path: str | None = Field(
        None, description="interaction configuration of verl (YAML): users who reply to turns"
    )


_NO_TOOLS = (
    "no tools are configured: set actor_rollout_ref.rollout.multi_turn.tool_config_path to verl's "
    "YAML file of tools, or remove tools_kwargs from the rows"
)


@dataclass(frozen=True)
class Shared:
    """Tools and simulated users of a worker process."""

    tools: ToolSet
    interactions: Mapping[str, Any]


class ToolsEnvironment:
    """Tools of one episode. Every call, also a wrong one, gets a tool message.

    A turn without calls ends the episode, unless a simulated user replies.
    """

    Params = ToolsParams

    def __init__(self, params: ToolsParams, shared: Shared) -> None:
        self._calls = ToolCalls(params, shared.tools)
        self._interactions = shared.interactions
        self._known = list(shared.tools.tools)
        self._user: InteractionSession | None = None
        self._messages: list[Message] = []

    @staticmethod
    async def prepare(params: ToolsParams) -> Shared:
        """Load the tools and interactions, once per worker process."""
        tools = await load_toolset(
            params.tools,
            params.tool_params,
            function_tool_path=params.function_tool_path,
            tool_config_path=params.tool_config_path,
            mcp_config_path=params.mcp_config_path,
        )
        path = params.interaction_config_path
        return Shared(tools, interactions_of_config(path) if path else {})

    async def reset(self, row: Row) -> None:
        """Start the tools that `extra_info.tool_selection` names, or all, and the user."""
        extra = row.get("extra_info") or {}
        kwargs = without_none(extra.get("tools_kwargs") or {})
        if unknown := [name for name in kwargs if name not in self._known]:
            hint = plugins.suggestion(unknown[0], self._known) if self._known else _NO_TOOLS
            raise ValueError(f"extra_info.tools_kwargs has the unknown tool {unknown[0]!r}; {hint}")
        episode = EpisodeInfo(uuid.uuid4().hex, list(row.get("prompt") or []), kwargs)
        await self._calls.start(episode, extra.get("tool_selection"))
        if self._interactions:
            self._messages = list(episode.messages)
            user = without_none(extra.get("interaction_kwargs") or {})
            self._user = InteractionSession(chosen(self._interactions, user), episode.id, user)
            await self._user.start()

    @property
    def tools(self) -> list[ToolSchema]:
        """Schemas of the tools of the episode."""
        return self._calls.schemas

    async def step(self, turn: Turn) -> Step:
        """Execute the calls of `turn` at the same time; without calls, the user replies."""
        if turn.calls or turn.malformed:
            step = await self._calls.execute(turn)
        elif self._user is None:
            return Step(done=True)
        else:
            step = await self._user.step([*self._messages, _message_of(turn)])
        if self._user is not None:
            self._messages += [_message_of(turn), *step.messages]
        return step

    async def score(self) -> Mapping[str, float] | None:
        """Return the scores of tools that have one, as components; the run's rewards score."""
        return await self._calls.scores()

    async def close(self) -> None:
        """Close all tools and the user. Raises the first error after all are closed."""
        closing = [self._calls.close()]
        if self._user is not None:
            closing.append(self._user.close())
        await close_all(closing)


def without_none(value: Any) -> Any:
    """Return a structure without the entries of dictionaries that are None.

    Parquet adds them: all rows of a column have the same keys.
    """
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def _message_of(turn: Turn) -> Message:
    """Return a turn of the policy as a chat message."""
    calls = [to_call(call.id, call.name, call.arguments) for call in turn.calls]
    message: Message = {"role": "assistant", "content": turn.text}
    if calls:
        message["tool_calls"] = calls
    return message
