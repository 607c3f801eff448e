"""Stores through which processes find each other, reachable at one address."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def listen(host: str, world_size: int) -> socket.socket:
    """Listen on a free port of `host` only: a store that opens its own socket listens on all."""
    return socket.create_server((host, 0), backlog=2 * world_size)


def open_store(listener: socket.socket, world_size: int, timeout: timedelta) -> TCPStore:
    """Open a store that takes over `listener`."""
    host, port = listener.getsockname()
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Connect to the store at `host:port`, which another process opens."""
    return TCPStore(
        host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False
    )
