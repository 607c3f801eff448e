"""Ray workers that are forks of one process with torch and transformers, for all tests.

`rlctl` forks such a process itself, unless Ray is imported, as in commands that are forks
(`tests.forks`) and in tests that use Ray in their own process. Without it a worker spends 5 s of
CPU time on imports.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import secrets
import socket
import threading
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
    threading.Thread(target=_end_with_tests, daemon=True).start()
    fork_server.serve(listener)


def _end_with_tests() -> None:
    """End this process with that of the tests, which may not run its exit functions."""
    tests = multiprocessing.parent_process()
    assert tests is not None, "it was started by them"
    tests.join()
    os._exit(0)


@contextmanager
def warm_workers() -> Iterator[None]:
    """Let the Ray sessions that start in the block have warm workers."""
    fork_server.use(address())
    try:
        yield
    finally:
        fork_server.use(None)
