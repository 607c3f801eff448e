"""Environments of OpenEnv servers: one WebSocket and session of the server for each episode."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from rlctl import plugins
from rlctl.packages import require
from rlctl.plugins.agents.environments.protocol import Row, Step
from rlctl.plugins.agents.environments.tool import as_text
from rlctl.runtime.sandbox.messages import MAX_REPLY
from rlctl.runtime.serving.chat import Message, ToolSchema, Turn

_FACTS = ("reward", "done", "metadata")  # of an observation; the rest is what the policy sees


class OpenEnvParams(plugins.Params):
    """Settings of an OpenEnv server."""

    url: str = Field(description="address of the server, such as http://localhost:8000")
    action_key: str | None = Field(
        "message", description="field of the action that gets the text; null: the text is JSON"
    )
    observation_key: str | None = Field(
        None, description="field of the observation that the policy sees; null: all, as JSON"
    )
    reset: dict[str, Any] = Field({}, description="arguments of reset of every episode")


class OpenEnvEnvironment:
    """Session of an OpenEnv server. Its rewards belong to the turns; the score is 0.

    `extra_info.seed` and `extra_info.reset_kwargs` of a row are arguments of its reset.
    """

    Params = OpenEnvParams
    tools: Sequence[ToolSchema] = ()  # an action is the text of a turn

    def __init__(self, params: OpenEnvParams) -> None:
        self._params = params
        self._socket: Any = None

    @staticmethod
    def prepare(params: OpenEnvParams) -> None:
        """Raise MissingExtraError without the package websockets."""
        del params
        require("websockets", "environments of OpenEnv need websockets", "openenv")

    async def reset(self, row: Row) -> list[Message] | str:
        """Open a session; return its first observation, which is added to the row's prompt."""
        from websockets.asyncio.client import connect

        url = self._params.url.rstrip("/").removesuffix("/ws").replace("http", "ws", 1)
        self._socket = await connect(f"{url}/ws", max_size=MAX_REPLY, ping_interval=None)
        extra = row.get("extra_info") or {}
        arguments = dict(self._params.reset)
        if extra.get("seed") is not None:
            arguments["seed"] = extra["seed"]
        arguments |= extra.get("reset_kwargs") or {}
        text = self._shown(await self._request("reset", arguments))
        if row.get("prompt"):
            return text
        return [{"role": "user", "content": text}]

    async def step(self, turn: Turn) -> Step:
        """Send the turn as an action; the reply to one that is no JSON is an error message."""
        key = self._params.action_key
        try:
            action = {key: turn.text} if key is not None else json.loads(turn.text)
        except ValueError as error:
            return Step([{"role": "user", "content": f"error: the action is no JSON: {error}"}])
        data = await self._request("step", action)
        reward = None if data.get("reward") is None else float(data["reward"])
        if data.get("done"):
            return Step([], reward, done=True)
        return Step([{"role": "user", "content": self._shown(data)}], reward)

    async def score(self) -> float:
        """Return 0: the rewards belong to the turns."""
        return 0.0

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _request(self, kind: str, data: Any) -> Mapping[str, Any]:
        """Return the data of the server's reply. Raises RuntimeError with its error."""
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await self._socket.recv())
        found = reply.get("data") or {}
        if reply.get("type") == "error":
            raise RuntimeError(f"the server refused {kind}: {found.get('message', found)}")
        return found

    def _shown(self, data: Mapping[str, Any]) -> str:
        """Return what the policy sees of an observation."""
        observation = data.get("observation", {})
        key = self._params.observation_key
        if not isinstance(observation, Mapping):
            return as_text(observation)
        if key is not None:
            return as_text(observation[key])
        return as_text({name: v for name, v in observation.items() if name not in _FACTS})
