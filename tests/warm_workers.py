"""Ray workers that are forks of a process with torch and transformers, where Ray starts Python.

A new worker spends 5 s of CPU time on imports. Real ones are started by commands with
`process=True` or a marker (`tests.e2e.command`), and by tests that use Ray in their own process.

`python -m tests.warm_workers DESCRIPTOR` is the process that forks; it must not import Ray, which
reads its environment on import.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from rlctl.runs.process import die_with_parent
from rlctl.runtime.cluster import session

CLIENT = Path(__file__).with_name("warm_client.py")
MODULES = (
    "torch.distributed.fsdp",
    "rlctl.runtime.workers.process",
    "rlctl.runtime.workers.actor",
    "rlctl.runtime.workers.critic",
    "rlctl.runtime.workers.rollout",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.tokenization_auto",
)


@cache
def address() -> str:
    """Start the process that forks, once for each process of tests; return its socket."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    path = f"{folder.name}/s"
    with socket.socket(socket.AF_UNIX) as listener:  # clients connect before the process is ready
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_workers", str(listener.fileno())],
            env=os.environ | session._WORKER_ENV,
            cwd=Path(__file__).parents[1],
            pass_fds=[listener.fileno()],
            preexec_fn=die_with_parent,
        )
    atexit.register(folder.cleanup)
    atexit.register(process.kill)
    return path


@contextmanager
def warm_workers() -> Iterator[None]:
    """Let the Ray sessions that start in the block have warm workers."""
    options = session._options
    use(address())
    try:
        yield
    finally:
        session._options = options


def use(path: str) -> None:
    """Let the Ray sessions of this process have their workers from the socket `path`."""
    options = session._options

    def with_client(*arguments: Any) -> dict[str, Any]:
        found = options(*arguments)
        python = {"py_executable": f"{sys.executable} -IS {CLIENT} {path}"}
        return found | {"runtime_env": python | found["runtime_env"]}

    session._options = with_client


def serve(descriptor: int) -> NoReturn:
    """Fork a worker for each client of a listening socket."""
    listener = socket.socket(fileno=descriptor)
    for name in MODULES:
        import_module(name)
    assert "ray" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no worker becomes a zombie
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _work(client)
        client.close()


def _work(client: socket.socket) -> NoReturn:
    """Become the worker of a client, which ends when this process does."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    request = b"".join(iter(lambda: client.recv(1 << 16), b""))
    sys.argv, cwd, environment = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
