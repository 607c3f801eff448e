"""Life of the board's server, from its address to Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from rlctl.errors import UsageError
from rlctl.network import is_loopback
from rlctl.plugins.console.board.access import Access
from rlctl.plugins.console.board.server import listen, make_app
from rlctl.plugins.console.board.token_file import SHORTEST, new_token, stored_token
from rlctl.plugins.console.board.views import PAGE, Views
from rlctl.redaction import redact
from rlctl.runs.listing import RunQuery


@dataclass(frozen=True)
class Listening:
    """Address, and rules for requests: every one needs a token."""

    host: str
    port: int
    token: str | None
    read_only: bool

    def access(self) -> Access:
        """Return the access rules. Raises UsageError for a token that can be guessed.

        The default token is the user's, from a file, on loopback. At an address that others reach
        it is a new one, because they are given it.
        """
        token = self.token
        if token is None and is_loopback(self.host):
            token = stored_token()
        if token is None:
            token = new_token()
        if len(token) < SHORTEST:
            raise UsageError(
                f"the token has {len(token)} characters, and others could guess it",
                hint=f"give {SHORTEST} or more, or leave out --token",
            )
        return Access(self.host, token, self.read_only)


async def serve(root: Path, listening: Listening, open_page: bool, as_json: bool) -> None:
    """Serve the runs under `root`, print the address on stdout, and wait for a signal."""
    access = listening.access()
    views = Views(root)
    runner, port = await listen(make_app(views, access), listening.host, listening.port)
    reading = asyncio.create_task(_read_early(views))
    url = _url(listening.host, port, access.token)
    place = str(root.resolve())
    line = url
    if as_json:
        line = json.dumps({"url": url, "port": port, "root": place, "token": access.token})
    print(line, flush=True)
    print(f"runs of {redact(place)}; Ctrl-C ends the board", file=sys.stderr)
    if open_page and _has_screen():
        # Other users see the command line of a browser: its address is good for one visit.
        await asyncio.to_thread(webbrowser.open, _url(listening.host, port, access.make_ticket()))
    try:
        await asyncio.Event().wait()
    finally:
        reading.cancel()
        await runner.cleanup()


async def _read_early(views: Views) -> None:
    """Read the first page before a browser asks for it."""
    gc.disable()  # a collection would traverse the records of all runs, which stay
    try:
        await asyncio.to_thread(views.runs, RunQuery(None, None, None, None, PAGE))
        gc.freeze()
    finally:
        gc.enable()


def _has_screen() -> bool:
    """Return True for a desktop session; elsewhere a browser of the terminal would open."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


def _url(host: str, port: int, token: str | None) -> str:
    """Return the address for a browser; for all interfaces, with this machine's name."""
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    if ":" in host:
        host = f"[{host}]"
    address = f"http://{host}:{port}/"
    return f"{address}?token={quote(token)}" if token else address
