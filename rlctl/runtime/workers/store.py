"""Stores through which processes find each other, reachable at one address."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def open_store(host: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Open a store that listens at `host:port` only; port 0 is a free one.

    A store that opens its own socket listens on all interfaces.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2 * world_size)
        port = listener.getsockname()[1]
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
