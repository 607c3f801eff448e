"""Ray workers that are forks of one process with torch and transformers, for all tests.

`rlctl` forks such a process itself, unless Ray is imported, as in commands that are forks
(`tests.forks`) and in tests that use Ray in their own process. Without it a worker spends 5 s of
CPU time on imports.

`python -m tests.warm_workers DESCRIPTOR` is the process that forks.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from rlctl.runs.process import die_with_parent
from rlctl.runtime.cluster import fork_server


@cache
def address() -> str:
    """Start the process that forks, once for each process of tests; return its socket."""
    name = f"rlctl-tests-{secrets.token_hex(16)}"
    with fork_server.listening(name) as listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_workers", str(listener.fileno())],
            cwd=Path(__file__).parents[1],
            pass_fds=[listener.fileno()],
            preexec_fn=die_with_parent,
            start_new_session=True,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},
        )
    atexit.register(process.kill)
    return name


@contextmanager
def warm_workers() -> Iterator[None]:
    """Let the Ray sessions that start in the block have warm workers."""
    fork_server.use(address())
    try:
        yield
    finally:
        fork_server.use(None)


if __name__ == "__main__":
    import rlctl.runtime.resume  # noqa: F401  # what rlctl itself has imported

    fork_server.serve(socket.socket(fileno=int(sys.argv[1])))
