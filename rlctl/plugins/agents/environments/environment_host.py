"""Environments of many episodes in one worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlctl.plugins.agents.environments.environment_loading import Factory, load_environment
from rlctl.plugins.agents.environments.protocol import (
    Environment,
    Row,
    checked_messages,
    checked_score,
    step_to_json,
)
from rlctl.plugins.user_code import report_errors
from rlctl.runtime.sandbox import calls
from rlctl.runtime.serving.chat import ToolSchema, Turn


@dataclass
class _Episode:
    environment: Environment | None = None  # until it is built
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class EnvironmentHost:
    """Host of the environment `name`; `call_s` limits a call of a tool."""

    _load: Callable[[], Awaitable[Factory]]
    _factory: Factory

    def __init__(self, name: str, call_s: float) -> None:
        calls.set_call_limit(call_s)
        self._name = name
        self._episodes: dict[str, _Episode] = {}

    def load(self, params: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Import the environment; see `load_environment`."""
        self._load = load_environment(self._name, params, defaults)

    async def describe(self) -> list[ToolSchema]:
        """Prepare the environment and return the tools that are known before an episode.

        There are none if they depend on its row. Raises ConfigError if the environment cannot be
        built.
        """
        self._factory = await self._load()
        failure = f"the environment {self._name!r} cannot be built"
        hint = "its class gets no row before `reset`"
        with report_errors(failure, self._name, hint=hint):
            environment = await calls.call(self._factory)
        try:
            return list(environment.tools)
        except Exception:
            return []
        finally:
            with suppress(Exception):
                limit = min(calls.CLOSE_S, calls.call_limit())
                await calls.limited(calls.call(environment.close), limit)

    async def open(self, episode: str, row: Row) -> dict[str, Any]:
        """Start an episode and return the messages of `reset` and the tools."""
        self._episodes[episode] = _Episode()
        environment, found = await self._call(episode, "reset", row)
        messages = found if found is None or isinstance(found, str) else checked_messages(found)
        return {"messages": messages, "tools": list(environment.tools)}

    async def step(self, episode: str, turn: Turn) -> dict[str, Any]:
        """Return the environment's reply to a turn."""
        return step_to_json((await self._call(episode, "step", turn))[1])

    async def score(self, episode: str) -> float | dict[str, float] | None:
        """Return the score of the finished episode."""
        return checked_score((await self._call(episode, "score"))[1])

    async def close(self, episode: str) -> None:
        """Cancel what the episode still does, and close its environment."""
        closed = self._episodes.pop(episode, None)
        if closed is None:
            return
        for task in closed.tasks:
            task.cancel()
        if closed.environment is not None:
            await calls.call(closed.environment.close)

    async def _call(self, key: str, method: str, *args: Any) -> tuple[Environment, Any]:
        """Return the environment of an episode and what its method returns."""
        episode = self._episodes[key]
        task = asyncio.current_task()
        assert task is not None  # a request is processed in one
        episode.tasks.add(task)
        try:
            environment = episode.environment
            if environment is None:
                environment = episode.environment = await calls.call(self._factory)
            return environment, await calls.call(getattr(environment, method), *args)
        finally:
            episode.tasks.discard(task)
