"""Environment of tools, and of simulated users who reply to turns without calls."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from rlctl import plugins
from rlctl.runtime.agents.environments.calls import call_limit, limited
from rlctl.runtime.agents.environments.protocol import (
    MalformedCall,
    Message,
    Row,
    Step,
    ToolCall,
    ToolSchema,
    ToolUse,
    Turn,
)
from rlctl.runtime.agents.environments.tool import (
    EpisodeInfo,
    Side,
    ToolResult,
    ToolSession,
    truncated,
)
from rlctl.runtime.agents.environments.toolset import ToolSet, load_toolset
from rlctl.runtime.agents.environments.verl.interactions import (
    InteractionSession,
    chosen,
    interactions_of_config,
)


class ToolsParams(plugins.Params):
    """Settings of the tools environment. The names of verl's keys are those of verl."""

    tools: tuple[str, ...] = Field((), description="tools: names, module:name or path.py:name")
    tool_params: dict[str, dict[str, Any]] = Field({}, description="settings of tools by name")
    function_tool_path: str | None = Field(None, description="file with @function_tool functions")
    tool_config_path: str | None = Field(None, description="tool configuration of verl (YAML)")
    interaction_config_path: str | None = Field(
        None, description="interaction configuration of verl (YAML): users who reply to turns"
    )
    max_parallel_calls: int = Field(1, ge=1, description="calls of one turn that are executed")
    max_tool_response_length: int = Field(256, ge=1, description="longest result in characters")
    tool_response_truncate_side: Side = Field(
        "middle", description="part of a longer result to keep: left, middle (both ends) or right"
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
        self._params, self._set, self._interactions = params, shared.tools, shared.interactions
        self._names = list(shared.tools.tools)
        self._sessions: dict[str, ToolSession] = {}
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
        )
        path = params.interaction_config_path
        return Shared(tools, interactions_of_config(path) if path else {})

    async def reset(self, row: Row) -> None:
        """Start the tools that `extra_info.tool_selection` names, or all, and the user."""
        extra = row.get("extra_info") or {}
        kwargs = without_none(extra.get("tools_kwargs") or {})
        self._names = _selected(extra.get("tool_selection"), self._names)
        if unknown := [name for name in kwargs if name not in self._set.tools]:
            hint = plugins.suggestion(unknown[0], list(self._set.tools))
            raise ValueError(f"extra_info.tools_kwargs has the unknown tool {unknown[0]!r}; {hint}")
        episode = EpisodeInfo(uuid.uuid4().hex, list(row.get("prompt") or []), kwargs)
        for name in self._names:
            self._sessions[name] = await self._set.tools[name].session(episode)
        if self._interactions:
            self._messages = list(episode.messages)
            user = without_none(extra.get("interaction_kwargs") or {})
            self._user = InteractionSession(chosen(self._interactions, user), episode.id, user)
            await self._user.start()

    @property
    def tools(self) -> list[ToolSchema]:
        """Schemas of the tools of the episode."""
        return self._set.schemas(self._names)

    async def step(self, turn: Turn) -> Step:
        """Execute the calls of `turn` at the same time; without calls, the user replies."""
        if turn.calls or turn.malformed:
            step = await self._execute_all(turn)
        elif self._user is None:
            return Step(done=True)
        else:
            step = await self._user.step([*self._messages, _message_of(turn)])
        if self._user is not None:
            self._messages += [_message_of(turn), *step.messages]
        return step

    async def _execute_all(self, turn: Turn) -> Step:
        allowed = self._params.max_parallel_calls
        executed = await asyncio.gather(*(self._execute(each) for each in turn.calls[:allowed]))
        refused = [self._refuse(each) for each in turn.calls[allowed:]]
        malformed = [self._explain(each) for each in turn.malformed]
        replies = [*executed, *refused, *malformed]
        rewards = [(use.name, result.reward) for _, use, result in replies if result.reward]
        metrics = {use.name: dict(result.metrics) for _, use, result in replies if result.metrics}
        info = {"tool_rewards": rewards} if rewards else {}
        return Step(
            [message for message, _, _ in replies],
            uses=[use for _, use, _ in replies],
            info={**info, "tool_metrics": metrics} if metrics else info,
        )

    async def score(self) -> Mapping[str, float] | None:
        """Return the scores of tools that have one, as components; the run's rewards score."""
        scores = {name: await session.score() for name, session in self._sessions.items()}
        return {name: score for name, score in scores.items() if score is not None} or None

    async def close(self) -> None:
        """Close all tools and the user. Raises the first error after all are closed."""
        sessions, self._sessions = list(self._sessions.values()), {}
        closing = [each.close() for each in sessions] + ([self._user.close()] if self._user else [])
        results = await asyncio.gather(
            *(limited(each, call_limit()) for each in closing), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _execute(self, call: ToolCall) -> tuple[Message, ToolUse, ToolResult]:
        """Execute one call within its time limit."""
        started = time.monotonic()
        error: str | None = None
        if call.name not in self._sessions:
            known = ", ".join(self._sessions) or "none"
            error, result = "unknown", _error(f"unknown tool {call.name!r}; known: {known}")
        elif wrong := self._set.checkers[call.name](call.arguments):
            error, result = "malformed", _error(f"wrong arguments: {wrong}")
        else:
            try:
                result = await limited(self._sessions[call.name].call(call.arguments), call_limit())
            except TimeoutError:
                error, result = "timeout", _error(f"timed out after {call_limit():g} s")
            except Exception as raised:
                error, result = "raised", _error(f"{type(raised).__name__}: {raised}")
        use = ToolUse(call.name, time.monotonic() - started, error)
        return self._message(result.text, call.id, call.name), use, result

    def _refuse(self, call: ToolCall) -> tuple[Message, ToolUse, ToolResult]:
        allowed = self._params.max_parallel_calls
        result = _error(f"not executed: at most {allowed} tool calls are allowed in one turn")
        use = ToolUse(call.name, 0.0, "too_many")
        return self._message(result.text, call.id, call.name), use, result

    def _explain(self, call: MalformedCall) -> tuple[Message, ToolUse, ToolResult]:
        result = _error(f"malformed tool call: {call.reason}")
        return self._message(result.text), ToolUse("", 0.0, "malformed"), result

    def _message(self, text: str, call: str | None = None, name: str | None = None) -> Message:
        limit, side = (
            self._params.max_tool_response_length,
            self._params.tool_response_truncate_side,
        )
        message = {"role": "tool", "content": truncated(text, limit, side)}
        return message if call is None else {**message, "tool_call_id": call, "name": name}


def without_none(value: Any) -> Any:
    """Return a structure without the entries of dictionaries that are None.

    Parquet adds them: all rows of a column have the same keys.
    """
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


def _selected(names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the tools of a row. Raises ValueError for an unknown one."""
    if names is None:
        return list(known)
    if unknown := [name for name in names if name not in known]:
        hint = plugins.suggestion(unknown[0], list(known))
        raise ValueError(f"extra_info.tool_selection has the unknown tool {unknown[0]!r}; {hint}")
    return list(names)


def _message_of(turn: Turn) -> Message:
    """Return a turn of the policy as a chat message."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in turn.calls
    ]
    message: Message = {"role": "assistant", "content": turn.text}
    return {**message, "tool_calls": calls} if calls else message


def _error(text: str) -> ToolResult:
    return ToolResult(f"error: {text}")
