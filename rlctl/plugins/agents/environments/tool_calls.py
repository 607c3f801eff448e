"""Execution of the tool calls of a turn; also a wrong call gets a message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from pydantic import Field

from rlctl import plugins
from rlctl.plugins.agents.environments.protocol import Step, ToolUse
from rlctl.plugins.agents.environments.tool import (
    EpisodeInfo,
    Side,
    ToolResult,
    ToolSession,
    truncated,
)
from rlctl.plugins.agents.environments.toolset import ToolSet
from rlctl.runtime.sandbox.calls import call_limit, limited
from rlctl.runtime.serving.chat import Message, ToolCall, ToolSchema, Turn


class CallParams(plugins.Params):
    """Settings of tool calls, with verl's names."""

    max_parallel_calls: int = Field(1, ge=1, description="calls of one turn that are executed")
    max_tool_response_length: int = Field(256, ge=1, description="longest result in characters")
    tool_response_truncate_side: Side = Field(
        "middle", description="part of a longer result to keep: left, middle (both ends) or right"
    )


class ToolCalls:
    """The tools of one episode."""

    def __init__(self, params: CallParams, tools: ToolSet) -> None:
        self._params = params
        self._set = tools
        self._names = list(tools.tools)
        self._sessions: dict[str, ToolSession] = {}

    @property
    def schemas(self) -> list[ToolSchema]:
        """Schemas of the tools of the episode."""
        return [self._set.tools[name].schema for name in self._names]

    async def start(self, episode: EpisodeInfo, selection: Sequence[str] | None = None) -> None:
        """Start the tools `selection`, or all. Raises ValueError for unknown tools."""
        self._names = _selected(selection, self._names)
        for name in self._names:
            self._sessions[name] = await self._set.tools[name].session(episode)

    async def execute(self, turn: Turn) -> Step:
        """Execute the calls of `turn` at the same time."""
        allowed = self._params.max_parallel_calls
        executed = await asyncio.gather(*(self._execute(call) for call in turn.calls[:allowed]))
        refusal = _error(f"not executed: at most {allowed} tool calls are allowed in one turn")
        refused = [self._reply(refusal, "too_many", call) for call in turn.calls[allowed:]]
        reasons = [_error(f"malformed tool call: {call.reason}") for call in turn.malformed]
        malformed = [self._reply(reason, "malformed") for reason in reasons]
        replies = [*executed, *refused, *malformed]
        rewards = [result.reward for _, _, result in replies if result.reward is not None]
        metrics = {use.name: dict(result.metrics) for _, use, result in replies if result.metrics}
        facts = {"tool_rewards": rewards, "tool_metrics": metrics}
        return Step(
            [message for message, _, _ in replies],
            uses=[use for _, use, _ in replies],
            info={name: value for name, value in facts.items() if value},
        )

    async def scores(self) -> Mapping[str, float] | None:
        """Return the scores of the tools that have one; None if none has."""
        scores = {name: await session.score() for name, session in self._sessions.items()}
        return {name: score for name, score in scores.items() if score is not None} or None

    async def close(self) -> None:
        """Close all sessions. Raises the first error after all are closed."""
        sessions = list(self._sessions.values())
        self._sessions = {}
        await close_all([session.close() for session in sessions])

    async def _execute(self, call: ToolCall) -> tuple[Message, ToolUse, ToolResult]:
        """Execute one call within its time limit."""
        started = time.monotonic()
        error: str | None = None
        if call.name not in self._sessions:
            known = ", ".join(self._sessions) or "none"
            error = "unknown"
            result = _error(f"unknown tool {call.name!r}; known: {known}")
        elif wrong := self._set.checkers[call.name](call.arguments):
            error = "malformed"
            result = _error(f"wrong arguments: {wrong}")
        else:
            try:
                result = await limited(self._sessions[call.name].call(call.arguments), call_limit())
            except TimeoutError as late:
                text = str(late) or f"timed out after {call_limit():g} s"
                error = "timeout"
                result = _error(text)
            except Exception as raised:
                error = "raised"
                result = _error(f"{type(raised).__name__}: {raised}")
        return self._reply(result, error, call, time.monotonic() - started)

    def _reply(
        self,
        result: ToolResult,
        error: str | None,
        call: ToolCall | None = None,
        seconds: float = 0.0,
    ) -> tuple[Message, ToolUse, ToolResult]:
        """Return a result as the message of its call, the record of the call, and the result."""
        params = self._params
        name = "" if call is None else call.name
        limit = params.max_tool_response_length
        side = params.tool_response_truncate_side
        content: Any = truncated(result.text, limit, side)
        if result.images:
            images = [{"type": "image", "image": image} for image in result.images]
            content = [*images, {"type": "text", "text": content}]
        message = {"role": "tool", "content": content}
        if call is not None:
            message |= {"tool_call_id": call.id, "name": name}
        return message, ToolUse(name, seconds, error), result


async def close_all(closing: Sequence[Awaitable[None]]) -> None:
    """Await all of `closing`, within the limit of a call; then raise the first error."""
    results = await asyncio.gather(
        *(limited(work, call_limit()) for work in closing), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _selected(names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the tools of a row. Raises ValueError for an unknown one."""
    if names is None:
        return list(known)
    if unknown := [name for name in names if name not in known]:
        hint = plugins.suggestion(unknown[0], list(known))
        raise ValueError(f"extra_info.tool_selection has the unknown tool {unknown[0]!r}; {hint}")
    return list(names)


def _error(text: str) -> ToolResult:
    return ToolResult(f"error: {text}")
