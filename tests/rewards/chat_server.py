"""Real HTTP server with the API of chat completions, for tests: slow or failing on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Reply:
    """Reply to a request: `text` of the message, or another status or body."""

    text: str = '{"reasoning": "fine", "score": 7}'
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    delay_s: float = 0.0


@dataclass
class ChatServer:
    """Server on a thread; `reply` gets the number and the body of each request."""

    reply: Callable[[int, dict[str, Any]], Reply]
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        reply = self.reply(len(self.bodies) - 1, body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(reply.delay_s)
        finally:
            self.num_open -= 1
        message = {"role": "assistant", "content": reply.text}
        found = {
            "choices": [{"message": message, "finish_reason": "stop"}],
            "usage": {"total_tokens": 100},
        }
        text = json.dumps(found) if reply.body is None else reply.body
        return web.Response(
            text=text,
            status=reply.status,
            headers=reply.headers,
            content_type="application/json",
        )


@contextmanager
def chat_server(
    reply: Callable[[int, dict[str, Any]], Reply] = lambda *_: Reply(),
) -> Iterator[ChatServer]:
    """Serve until the end of the block."""
    server, loop = ChatServer(reply), asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server._chat)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        server.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
