"""Environments of TRL: classes whose public methods are tools (`environment_factory`).

A dictionary of classes has one for each value of the row's column `environment`.

`reset(**row)` may return a text that is added to the prompt; `get_reward()` is optional. The
package `trl` is not needed.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from rlctl.plugins.agents.environments.function_tools import FunctionTool
from rlctl.plugins.agents.environments.protocol import Row, Step
from rlctl.plugins.agents.environments.tool import EpisodeInfo, accepted
from rlctl.plugins.agents.environments.tool_calls import CallParams, ToolCalls
from rlctl.plugins.agents.environments.toolset import tool_set
from rlctl.plugins.user_code import load_named
from rlctl.runtime.sandbox.calls import call
from rlctl.runtime.serving.chat import ToolSchema, Turn

_KIND = "environments"
_NOT_TOOLS = ("reset", "get_reward", "close")


class TRLParams(CallParams):
    """Settings of an environment of TRL."""

    factory: str | dict[str, str] = Field(
        description="class, or dictionary of classes: module:Name, path.py:Name, or {name: class}"
    )


class TRLEnvironment:
    """Class of TRL as an environment: public methods are tools, a turn without calls is the end."""

    Params = TRLParams

    def __init__(self, params: TRLParams, shared: Mapping[str, Callable[[], Any]]) -> None:
        self._params = params
        self._factories = shared
        self._object: Any = None
        self._calls: ToolCalls | None = None

    @staticmethod
    def prepare(params: TRLParams) -> Mapping[str, Callable[[], Any]]:
        """Import the classes; return them by name, `""` if there is one for all rows.

        Raises ConfigError for methods that cannot be tools.
        """
        found: Any = params.factory
        if isinstance(found, str):
            found = load_named(_KIND, found, "environment")
        classes = dict(found) if isinstance(found, Mapping) else {"": found}
        for key, factory in classes.items():
            if isinstance(factory, str):
                classes[key] = load_named(_KIND, factory, "environment")
            _schemas(classes[key])
        return classes

    async def reset(self, row: Row) -> str | None:
        """Build the object and call its `reset` with the row and its `extra_info` as arguments."""
        extra = row.get("extra_info") or {}
        self._object = await call(self._chosen(extra.get("environment")))
        arguments = accepted(self._object.reset, **{**extra, **row})
        text = await call(self._object.reset, **arguments)
        methods = [getattr(self._object, name) for name in tool_names(type(self._object))]
        self._calls = ToolCalls(
            self._params, tool_set([FunctionTool(method) for method in methods])
        )
        await self._calls.start(EpisodeInfo(uuid.uuid4().hex, list(row.get("prompt") or []), {}))
        return text if isinstance(text, str) else None

    @property
    def tools(self) -> list[ToolSchema]:
        """Schemas of the public methods."""
        if self._calls is not None:
            return self._calls.schemas
        return [schema for factory in self._factories.values() for schema in _schemas(factory)]

    def _chosen(self, name: Any) -> Callable[[], Any]:
        """Return the class for a row whose column `environment` is `name`."""
        found = self._factories.get("") or self._factories.get(str(name))
        if found is None:
            known = ", ".join(self._factories)
            raise ValueError(f"environment of the row is {name!r}; known: {known}")
        return found

    async def step(self, turn: Turn) -> Step:
        """Call the methods that `turn` names."""
        if self._calls is None or not (turn.calls or turn.malformed):
            return Step(done=True)
        return await self._calls.execute(turn)

    async def score(self) -> float | None:
        """Return the result of `get_reward`; None if the class has none."""
        method = getattr(self._object, "get_reward", None)
        if method is None:
            return None
        return await call(method)

    async def close(self) -> None:
        """Call `close` of the object, if it has it."""
        method = getattr(self._object, "close", None)
        if method is not None:
            await call(method)


def _schemas(found: Any) -> list[ToolSchema]:
    """Return the schemas of the public methods of a class."""
    methods = [getattr(found, name) for name in tool_names(found)]
    return [FunctionTool(method, skip_self=True).schema for method in methods]


def tool_names(found: Any) -> list[str]:
    """Return the names of the public methods of a class, in the order of their definition."""
    names = {
        name: None
        for base in reversed(inspect.getmro(found))
        for name, value in vars(base).items()
        if inspect.isroutine(value)
    }
    return [name for name in names if not name.startswith("_") and name not in _NOT_TOOLS]
