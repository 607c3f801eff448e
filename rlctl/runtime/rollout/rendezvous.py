"""Addresses at which the processes of a group find each other."""

from __future__ import annotations

import os
import socket
import sys

import psutil


def listen(host: str, world_size: int) -> socket.socket:
    """Listen on a free port of `host` only: a store that opens a socket listens on all."""
    return socket.create_server((host, 0), backlog=2 * world_size)


def use_interface_to(host: str) -> str:
    """Let gloo in this process use the network interface that leads to `host`, unless one is set.

    Gloo chooses that of the machine's name, which often is the loopback interface or unknown.
    Returns the address of this machine on that interface.
    """
    family, kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: sends nothing
        local = probe.getsockname()[0]
    if os.environ.get("GLOO_SOCKET_IFNAME") or sys.platform != "linux":
        return local
    for name, addresses in psutil.net_if_addrs().items():
        if local in [one.address.partition("%")[0] for one in addresses]:
            os.environ["GLOO_SOCKET_IFNAME"] = name
    return local
