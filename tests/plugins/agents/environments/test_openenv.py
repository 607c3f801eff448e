"""Tests of OpenEnv servers: a real server, a socket for each episode."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.plugins.agents.environments.environment_pool import EnvironmentFailed, EnvironmentPool
from rlctl.plugins.agents.environments.protocol import Step
from rlctl.runtime.serving.chat import Turn
from tests.plugins.agents.environments.episodes import LONG, play_here

CAPACITY = 2


class Server:
    """Counting game that speaks OpenEnv's protocol in a thread."""

    def __init__(self) -> None:
        self.sessions = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()])

    async def _run(self) -> None:
        from websockets.asyncio.server import serve

        self._stop = asyncio.Event()
        async with serve(self._session, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._stop.wait()

    async def _session(self, socket: Any) -> None:
        assert socket.request.path == "/ws"
        self.sessions += 1
        count, is_refused = 0, self.sessions > CAPACITY
        try:
            async for text in socket:
                message = json.loads(text)
                data = message["data"]
                if is_refused:
                    error = {"message": "at capacity", "code": "CAPACITY_REACHED"}
                    await socket.send(json.dumps({"type": "error", "data": error}))
                    continue
                if message["type"] == "reset":
                    count, reward, done = data.get("seed", 0) + data.get("plus", 0), None, False
                else:
                    count += int(data.get("by") or data["message"])
                    reward, done = count / 10, count >= 10
                observation = {"count": count, "text": f"count {count}", "metadata": {}}
                reply = {"observation": observation, "reward": reward, "done": done}
                await socket.send(json.dumps({"type": "observation", "data": reply}))
        finally:
            self.sessions -= 1

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    pytest.importorskip("websockets")
    with Server() as server:
        yield server


def test_an_episode(server: Server, tmp_path: Path) -> None:
    async def run() -> list[Step]:
        row = {"prompt": [{"role": "user", "content": "?"}], "extra_info": {"seed": 3}}
        remote = await pool.open(row, "a")
        other = await pool.open({"extra_info": {"reset_kwargs": {"plus": 7}}}, "b")
        assert (remote.messages, remote.tools) == ("count 3", [])
        assert other.messages == [{"role": "user", "content": "count 7"}]
        with pytest.raises(EnvironmentFailed, match="refused reset: at capacity"):
            await pool.open({}, "c")
        steps = [await remote.step(Turn(text)) for text in ("1", "6")]
        assert await remote.score() == 0.0
        await remote.close()
        await other.close()
        return steps

    params = {"url": server.url, "observation_key": "text"}
    with EnvironmentPool("openenv", params, timeouts=LONG) as pool:
        assert asyncio.run(run()) == [
            Step([{"role": "user", "content": "count 4"}], 0.4, False),
            Step([], 1.0, True),
        ]


def test_actions_in_json(server: Server) -> None:
    params = {"url": server.url, "action_key": None}
    wrong, right = play_here("openenv", params, [Turn("two"), Turn('{"by": 2}')]).steps
    assert wrong.messages[0]["content"].startswith("error: the action is no JSON")
    assert json.loads(right.messages[0]["content"]) == {"count": 2, "text": "count 2"}


def test_server_that_is_gone() -> None:
    pytest.importorskip("websockets")
    with (
        EnvironmentPool("openenv", {"url": "http://127.0.0.1:9"}) as pool,
        pytest.raises(EnvironmentFailed, match=r"error: open: .*Connect"),
    ):
        asyncio.run(pool.open({}, "a"))
