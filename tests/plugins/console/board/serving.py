"""A board that serves from a thread of the test's process, and requests to it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlencode

from rlctl.plugins.console.board.access import Access
from rlctl.plugins.console.board.server import listen, make_app
from rlctl.plugins.console.board.views import Views


@dataclass(frozen=True)
class Served:
    """Address of a board and its access rules."""

    url: str
    access: Access

    def request(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """Return status and text of a response; `body` makes it a POST."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of a successful request."""
        status, text = self.request(f"/api/{path}?{urlencode(query, doseq=True)}")
        assert status == 200, text
        return json.loads(text)

    def act(self, run: str, action: str, text: str = "", **headers: str) -> tuple[int, Any]:
        """Return status and JSON of an action, with the CSRF token of the page."""
        _, page = self.request("/")
        found = re.search('"csrf": "([^"]+)"', page)
        assert found
        given = {"X-CSRF-Token": found[1], **headers}
        status, done = self.request("/api/act", {"run": run, "action": action, "text": text}, given)
        return status, json.loads(done)


@contextmanager
def serving(root: Path, access: Access | None = None) -> Iterator[Served]:
    """Serve the runs under `root` on a free port of loopback."""
    rules = access or Access("127.0.0.1", None)
    stop: list[Callable[[], object]] = []
    ports: Queue[int] = Queue()

    async def serve() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        runner, port = await listen(make_app(Views(root), rules), "127.0.0.1", 0)
        ports.put(port)
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{ports.get(timeout=60)}", rules)
    finally:
        stop[0]()
        thread.join(60)
