"""Quick connection test for servers, because SDKs of trackers retry for minutes."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

TIMEOUT_S = 2.0


def reachable(url: str) -> bool:
    """Return True if the server of `url`, or its proxy, accepts a connection in `TIMEOUT_S`."""
    target = urlsplit(url)
    proxy = getproxies().get(target.scheme)
    if proxy and not proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = target.port or {"http": 80}.get(target.scheme, 443)
    connected: Future[bool] = Future()
    # Name resolution ignores the socket's timeout, so another thread does it.
    threading.Thread(
        target=_connect, args=(target.hostname or "", port, connected), daemon=True
    ).start()
    try:
        return connected.result(TIMEOUT_S)
    except FutureTimeout:
        return False


def _connect(host: str, port: int, connected: Future[bool]) -> None:
    try:
        socket.create_connection((host, port), TIMEOUT_S).close()
        connected.set_result(True)
    except OSError:
        connected.set_result(False)
