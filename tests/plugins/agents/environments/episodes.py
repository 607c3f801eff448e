"""Episodes of given turns: in a worker process, or with the environment in this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.plugins.agents.environments.environment_loading import load_environment
from rlctl.plugins.agents.environments.environment_pool import EnvironmentPool, Timeouts
from rlctl.plugins.agents.environments.protocol import Step
from rlctl.runtime.sandbox.worker_settings import WorkerSettings
from rlctl.runtime.serving.chat import ToolCall, ToolSchema, Turn

LONG = Timeouts(call_s=300, turn_s=300)
_STAND_INS = ("verl", "skyrl_gym")


@dataclass
class Played:
    """An episode: the result of `reset`, the tools, the steps and the score."""

    messages: Any
    tools: Sequence[ToolSchema]
    steps: list[Step]
    score: Any

    @property
    def texts(self) -> list[str]:
        return [message["content"] for step in self.steps for message in step.messages]


def names_of(tools: Sequence[ToolSchema]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def turn_of(name: str, /, **arguments: Any) -> Turn:
    """Return a turn with one call."""
    return Turn("", (ToolCall("1", name, arguments),))


def play(
    environment: str,
    params: Mapping[str, Any],
    turns: Sequence[Turn],
    row: Mapping[str, Any] | None = None,
) -> Played:
    """Play in a worker process, whose output goes to `environment-0.log`."""

    async def run(pool: EnvironmentPool) -> Played:
        remote = await pool.open(row or {}, "k")
        steps = [await remote.step(turn) for turn in turns]
        score = await remote.score()
        await remote.close()
        return Played(remote.messages, remote.tools, steps, score)

    with EnvironmentPool(
        environment, params, timeouts=LONG, workers=WorkerSettings(logs=Path())
    ) as pool:
        return asyncio.run(run(pool))


def play_here(
    environment: str,
    params: Mapping[str, Any],
    turns: Sequence[Turn] = (),
    row: Mapping[str, Any] | None = None,
) -> Played:
    """Play in this process: it costs less, and errors are those of the environment itself."""

    async def run() -> Played:
        played = (await load_environment(environment, params)())()
        messages = await played.reset(row or {})
        steps = [await played.step(turn) for turn in turns]
        score = await played.score()
        await played.close()
        return Played(messages, list(played.tools), steps, score)

    with _modules_forgotten():
        return asyncio.run(run())


def load_here(environment: str, params: Mapping[str, Any]) -> Sequence[ToolSchema]:
    """Load the environment in this process and return the tools that need no row."""

    async def run() -> Sequence[ToolSchema]:
        return (await load_environment(environment, params)())().tools

    with _modules_forgotten():
        return asyncio.run(run())


@contextmanager
def _modules_forgotten() -> Iterator[None]:
    """Remove what only worker processes should have: stand-ins, and the modules of files."""
    path, modules = sys.path[:], set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if name.partition(".")[0] in _STAND_INS or file.startswith(str(Path.cwd())):
                del sys.modules[name]
        sys.path[:] = path
