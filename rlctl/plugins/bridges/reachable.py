"""Quick test of a server, because SDKs of trackers retry for minutes."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

TIMEOUT_S = 2.0


def reachable(url: str) -> bool:
    """Return True if the server of `url`, or its proxy, accepts a connection in `TIMEOUT_S`."""
    target = urlsplit(url)
    proxy = getproxies().get(target.scheme)
    if proxy and not proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    address = target.hostname or "", target.port or {"http": 80}.get(target.scheme, 443)
    connected = threading.Event()

    def connect() -> None:
        with suppress(OSError), socket.create_connection(address, TIMEOUT_S):
            connected.set()

    # Name resolution ignores the socket's timeout, so another thread does it.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return connected.is_set()
