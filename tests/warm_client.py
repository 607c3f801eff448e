"""Client of `tests.warm_workers` in the place of Python: `python -IS warm_client.py SOCKET ...`."""

import json
import os
import socket
import sys

server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [b"\0"], [0, 1, 2])
server.sendall(request)
server.shutdown(socket.SHUT_WR)
server.recv(1)  # until the worker ends: Ray watches this process until the worker is registered
