"""Client of `fork_server`, in place of Python: `python -IS fork_client.py NAME ARGUMENTS`.

It asks the server at the abstract socket NAME for a worker with the arguments, environment and
streams of this process, and ends with the worker. Without a server it becomes Python with ARGUMENTS
itself.
"""

import json
import os
import socket
import struct
import sys


def _request(name: str, words: list[str]) -> socket.socket | None:
    """Send the request of a worker; return the connection, None without a server of this user."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect("\0" + name)
        credentials = server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            return None
        socket.send_fds(server, [b"\0"], [0, 1, 2])
        server.sendall(json.dumps([words, os.getcwd(), os.getpgrp(), dict(os.environ)]).encode())
        server.shutdown(socket.SHUT_WR)
        return server if server.recv(1) else None  # the server has forked
    except OSError:
        return None


if __name__ == "__main__":
    connection = _request(sys.argv[1], sys.argv[2:])
    if connection is None:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    connection.recv(1)  # until the worker ends: Ray watches this process
