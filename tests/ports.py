"""Ports for servers that tests start in other processes."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a free port that the system gives to no other socket.

    It takes ports of sockets without a number from 32768 on (`ip_local_port_range`), and Ray those
    of workers from 10002 to 19999, so these may be taken when the server listens.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
