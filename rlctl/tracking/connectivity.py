"""Whether a server can be reached at all, known within seconds: SDKs of trackers try for minutes before they say so."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SECONDS = 2.0


def reachable(url: str) -> bool:
    """Whether somebody listens at `url`, or at the proxy that leads there, within `SECONDS`."""
    target = urlsplit(url)
    proxy = getproxies().get(target.scheme)
    if proxy and not proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = target.port or {"http": 80}.get(target.scheme, 443)
    found: Future[bool] = Future()
    # A resolver may take longer than any timeout of a socket, so it is waited for from outside.
    threading.Thread(
        target=_connect, args=(target.hostname or "", port, found), daemon=True
    ).start()
    try:
        return found.result(SECONDS)
    except NotInTime:
        return False


def _connect(host: str, port: int, found: Future[bool]) -> None:
    try:
        socket.create_connection((host, port), SECONDS).close()
        found.set_result(True)
    except OSError:
        found.set_result(False)
