"""Server-sent events: new rows of the runs on a page, and changes of the list of runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from rlctl.errors import RlctlError
from rlctl.plugins.console.board.views import Views

POLL_S = 0.5
IDLE_S = 2.0  # for runs that have ended: another process may resume them
KEEP_ALIVE_S = 15.0
_SHARE = 10  # reading takes at most this part of the time


async def send_events(request: web.Request, changes: Callable[[], list[Any]]) -> web.StreamResponse:
    """Send what `changes` returns, until the browser or the server closes the connection.

    `changes` runs in a thread and may raise RlctlError, which the page shows.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
    )
    await response.prepare(request)
    sent = time.monotonic()
    with suppress(ConnectionResetError):
        await response.write(b"retry: 2000\n\n")
        while True:
            began = time.monotonic()
            try:
                found = await asyncio.to_thread(changes)
            except RlctlError as error:
                found = [{"error": error.problems[0].message}]
            for event in found:
                text = json.dumps(event, ensure_ascii=False, allow_nan=False)
                await response.write(f"data: {text}\n\n".encode())
            now = time.monotonic()
            if found:
                sent = now
            elif now - sent > KEEP_ALIVE_S:
                await response.write(b": alive\n\n")
                sent = now
            await asyncio.sleep(max(POLL_S, _SHARE * (now - began)))
    return response


class RunChanges:
    """Changes of the runs on one page."""

    def __init__(self, views: Views, shown: dict[str, tuple[int, int]]) -> None:
        self.views = views
        self.shown = shown  # epoch and number of rows by key
        self.last: dict[str, list[Any]] = {}
        self.next_look: dict[str, float] = {}

    def __call__(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for key, (epoch, rows) in self.shown.items():
            if time.monotonic() < self.next_look.get(key, 0.0):
                continue
            update = self.views.update(key, epoch, rows)
            if not update["active"]:
                self.next_look[key] = time.monotonic() + IDLE_S
            seen = [update[name] for name in ("state", "alarms", "events", "steps")]
            new = update["new"]
            if new or self.last.get(key) not in (None, seen):
                found.append(update)
            if new and "rows" in new:
                self.shown[key] = (new["epoch"], new["rows"])
            self.last[key] = seen
        return found


class ListChanges:
    """Changes of the list of runs after `version`."""

    def __init__(self, views: Views, version: int) -> None:
        self.views = views
        self.version = version

    def __call__(self) -> list[dict[str, Any]]:
        before = self.version
        self.version = self.views.listing.read()
        if self.version == before:
            return []
        return [{"version": self.version}]
