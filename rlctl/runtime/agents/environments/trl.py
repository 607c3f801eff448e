"""Environments of TRL: classes whose public methods are tools (`environment_factory`).

`reset(**row)` may return a text that is added to the prompt; `get_reward()` is optional. The
package `trl` is not needed.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable
from typing import Any

from pydantic import Field

from rlctl.runtime.agents.environments.calls import call
from rlctl.runtime.agents.environments.function_tools import FunctionTool
from rlctl.runtime.agents.environments.protocol import Row, Step, ToolSchema, Turn
from rlctl.runtime.agents.environments.tool import EpisodeInfo, accepted
from rlctl.runtime.agents.environments.tool_calls import CallParams, ToolCalls
from rlctl.runtime.agents.environments.toolset import tool_set
from rlctl.runtime.sandbox.user_code import load_named

_NOT_TOOLS = ("reset", "get_reward", "close")


class TRLParams(CallParams):
    """Settings of an environment of TRL."""

    factory: str = Field(description="class: module:Class or path.py:Class")


class TRLEnvironment:
    """Class of TRL as an environment: public methods are tools, a turn without calls is the end."""

    Params = TRLParams

    def __init__(self, params: TRLParams, shared: Callable[[], Any]) -> None:
        self._params, self._factory = params, shared
        self._object: Any = None
        self._calls: ToolCalls | None = None

    @staticmethod
    def prepare(params: TRLParams) -> Callable[[], Any]:
        """Import the class. Raises ConfigError for methods that cannot be tools."""
        found = load_named("environments", params.factory, "environment")
        for name in tool_names(found):
            FunctionTool(getattr(found, name), skip_self=True)
        return found

    async def reset(self, row: Row) -> str | None:
        """Build the object and call its `reset` with the row and its `extra_info` as arguments."""
        self._object = await call(self._factory)
        extra = row.get("extra_info") or {}
        arguments = accepted(self._object.reset, **{**extra, **row})
        text = await call(self._object.reset, **arguments)
        methods = [getattr(self._object, name) for name in tool_names(type(self._object))]
        self._calls = ToolCalls(self._params, tool_set([FunctionTool(each) for each in methods]))
        await self._calls.start(EpisodeInfo(uuid.uuid4().hex, list(row.get("prompt") or []), {}))
        return text if isinstance(text, str) else None

    @property
    def tools(self) -> list[ToolSchema]:
        """Schemas of the public methods."""
        if self._calls is not None:
            return self._calls.schemas
        methods = [getattr(self._factory, name) for name in tool_names(self._factory)]
        return [FunctionTool(method, skip_self=True).schema for method in methods]

    async def step(self, turn: Turn) -> Step:
        """Call the methods that `turn` names."""
        if self._calls is None or not (turn.calls or turn.malformed):
            return Step(done=True)
        return await self._calls.execute(turn)

    async def score(self) -> float | None:
        """Return the result of `get_reward`; None if the class has none."""
        method = getattr(self._object, "get_reward", None)
        return None if method is None else await call(method)

    async def close(self) -> None:
        """Call `close` of the object, if it has it."""
        method = getattr(self._object, "close", None)
        if method is not None:
            await call(method)


def tool_names(found: Any) -> list[str]:
    """Return the names of the public methods of a class, in the order of their definition."""
    names = {
        name: None
        for each in reversed(inspect.getmro(found))
        for name, value in vars(each).items()
        if inspect.isroutine(value)
    }
    return [name for name in names if not name.startswith("_") and name not in _NOT_TOOLS]
