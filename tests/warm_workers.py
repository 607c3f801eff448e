"""Ray workers that are forks of one process with torch and transformers, for all tests.

`rlctl` forks such a process itself, unless Ray is imported, as in commands that are forks
(`tests.forks`) and in tests that use Ray in their own process. Without it a worker spends 5 s of
CPU time on imports.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from rlctl.runtime.cluster import fork_server
from tests.forks import FORKS


@cache
def address() -> str:
    """Start the process that forks, once for each process of tests; return its socket."""
    name = f"rlctl-tests-{secrets.token_hex(16)}"
    with fork_server.listening(name) as listener:
        process = FORKS.Process(target=_serve, args=(listener,))
        process.start()
    atexit.register(process.kill)  # before multiprocessing would wait for it
    return name


def _serve(listener: socket.socket) -> None:
    os.setsid()
    fork_server.serve(listener)


@contextmanager
def warm_workers() -> Iterator[None]:
    """Let the Ray sessions that start in the block have warm workers."""
    fork_server.use(address())
    try:
        yield
    finally:
        fork_server.use(None)
