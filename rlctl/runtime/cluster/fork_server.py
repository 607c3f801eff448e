"""Fork server: Ray workers forked from a process that has imported torch and transformers.

A worker that Ray starts spends as long on imports as the command itself. `start` forks this process
after its imports, while it has no threads, and Ray's workers are forks of that fork: it gets
`fork_client.py` as the Python of its workers. Their arguments, environment, folder, streams and
process group are those that Ray has given the client.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import os
import runpy
import secrets
import shlex
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rlctl.process import FORK_SERVER, die_with_parent
from rlctl.runtime.cluster.ray_access import is_loopback

CLIENT = Path(__file__).with_name("fork_client.py")

_server: str | None = None  # name of the socket


def start(address: str | None = None) -> None:
    """Fork the server for a run on the Ray cluster at `address` or RAY_ADDRESS, else on a new one.

    No-op if there is a server, for a cluster of several machines, and where a fork is not safe: in
    a process with threads or Ray, and with a torch for accelerators, which it may have initialized.
    Linux only. The server ends with the calling thread.
    """
    import torch

    accelerated = any((torch.version.cuda, torch.version.hip, torch.version.xpu))
    alone = threading.active_count() == 1 and "ray" not in sys.modules
    local = on_this_machine(address or os.environ.get("RAY_ADDRESS"))
    if not local or accelerated or not alone or _server is not None or sys.platform != "linux":
        return
    name = f"rlctl-{secrets.token_hex(16)}"
    with listening(name) as listener:
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            _ignore_terminal()
            serve(listener)
    use(name)


def use(name: str | None) -> None:
    """Let Ray sessions that start later have workers of the server `name`; None: of Ray itself."""
    global _server
    _server = name


def python(address: str | None) -> dict[str, str]:
    """Return the runtime environment of workers at `address`; empty if that of Ray does."""
    if _server is None or not on_this_machine(address):
        quoted = shlex.quote(sys.executable)  # which Ray forgets
        if quoted == sys.executable:
            return {}
        return {"py_executable": quoted}
    return {"py_executable": shlex.join([sys.executable, "-IS", str(CLIENT), _server])}


def listening(name: str) -> socket.socket:
    """Return an abstract socket (a name without a file) on which clients can connect at once."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen()
    return listener


def serve(listener: socket.socket) -> NoReturn:
    """Fork a worker for each client of this user, until the parent of this process exits."""
    with suppress(BaseException):
        die_with_parent()
        _set_name(FORK_SERVER)
        gc.freeze()  # a collection would copy pages that all workers share
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no worker becomes a zombie
        while True:
            client, _ = listener.accept()
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("3i", credentials)[1] == os.geteuid() and os.fork() == 0:
                listener.close()
                _work(client)
            client.close()
    os._exit(1)  # clients become workers themselves


def on_this_machine(address: str | None) -> bool:
    """Return True for a cluster that starts here (None), and for one on the loopback interface."""
    return address is None or is_loopback(address)


def _ignore_terminal() -> None:
    """Leave Ctrl-C to the process that has forked this one, and its handlers and exit functions."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    atexit._clear()
    logging.root.handlers.clear()


def _work(client: socket.socket) -> NoReturn:
    """Become the worker of a client, which ends when this process does."""
    code = 1
    try:
        _become(client)
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for thread in {*threading.enumerate()} - {threading.current_thread()}:
            if not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed
                stream.flush()
        os._exit(code)


def _become(client: socket.socket) -> None:
    """Take over streams, arguments, folder, process group and environment of a client."""
    import torch._dynamo

    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    request = b"".join(iter(lambda: client.recv(1 << 16), b""))
    sys.argv, folder, group, environment = json.loads(request)
    client.sendall(b"\0")
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    try:
        os.setpgid(0, group)  # Ray kills what a worker leaves by the group of the client
    except OSError:  # in another session
        os.setpgid(0, 0)
    _set_name("python")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    torch._dynamo.config.disable = environment.get("TORCHDYNAMO_DISABLE") == "1"
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]


def _set_name(name: str) -> None:
    """Set the name of this process in `ps` and `top` (PR_SET_NAME = 15)."""
    ctypes.CDLL(None).prctl(15, name.encode())
