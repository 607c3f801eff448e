"""Host of an agent program in a worker: a function that plays an episode with an OpenAI client.

For the pool it is an environment, whose score is what the program returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from pydantic import Field

from rlctl import plugins
from rlctl.errors import ConfigError
from rlctl.packages import require
from rlctl.plugins.agents.environments.protocol import Row, Step
from rlctl.plugins.user_code import load_named
from rlctl.runtime.sandbox.async_functions import is_async
from rlctl.runtime.sandbox.calls import call
from rlctl.runtime.serving.chat import ToolSchema, Turn

PARAMS_KEY = "actor_rollout_ref.rollout.agent.params"
ENDPOINT = "endpoint"  # key of the row with base_url and api_key

Program = Callable[[Mapping[str, Any], Any], Any]


class ProgramParams(plugins.Params):
    """Settings of the host."""

    program: str = Field(description="function: module:function, path.py:function or a plug-in")
    params: dict[str, Any] = Field({}, description="settings of a plug-in")


class ProgramEnvironment:
    """An episode that a program plays."""

    Params = ProgramParams
    tools: tuple[ToolSchema, ...] = ()

    def __init__(self, params: ProgramParams, shared: Program) -> None:
        del params
        self._program = shared
        self._row: Row = {}

    @staticmethod
    def prepare(params: ProgramParams) -> Program:
        """Load the program; one with settings is called with them and returns it.

        Raises ConfigError if it is no function, for wrong settings, and as `load_named`.
        """
        require("openai", "agent programs need openai", "agents")  # its client
        program = load_named("programs", params.program, "program")
        settings = plugins.parse_params(program, params.program, params.params, PARAMS_KEY)
        if settings is not None:
            return program(settings)
        if not callable(program) or isinstance(program, type):
            raise ConfigError(
                f"the program {params.program} is of type {type(program).__name__}",
                where="actor_rollout_ref.rollout.agent.program",
                hint="`async def run(task, client) -> float`",
            )
        return program

    async def reset(self, row: Row) -> None:
        """Keep the task and the address of the endpoint."""
        self._row = row

    async def step(self, turn: Turn) -> Step:
        """Refuse: the turns of a program reach it by its client."""
        raise NotImplementedError

    async def score(self) -> float | Mapping[str, float]:
        """Run the program and return what it returns."""
        task = {key: value for key, value in self._row.items() if key != ENDPOINT}
        async with AsyncExitStack() as stack:
            if is_async(self._program):
                client = await stack.enter_async_context(_async_client(**self._row[ENDPOINT]))
            else:
                client = stack.enter_context(_client(**self._row[ENDPOINT]))
            score = await call(self._program, task, client)
        if score is None or (isinstance(score, Mapping) and "score" not in score):
            raise TypeError(f"the program returned {score!r}, neither a number nor a `score`")
        return score

    async def close(self) -> None:
        """Do nothing: `score` has closed the client."""


# The endpoint is on this machine: no proxy, no certificates, which take long to load. The deadline
# is the episode's. A request that failed once fails again.
_HTTP: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": None}
_CLIENT: dict[str, Any] = {"max_retries": 0, "timeout": None}


def _async_client(base_url: str, api_key: str) -> Any:
    import openai

    http = openai.DefaultAsyncHttpxClient(**_HTTP)
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http, **_CLIENT)


def _client(base_url: str, api_key: str) -> Any:
    import openai

    http = openai.DefaultHttpxClient(**_HTTP)
    return openai.OpenAI(base_url=base_url, api_key=api_key, http_client=http, **_CLIENT)
