"""Guard of a worker process: its parent, which the controller starts and which forks it.

With a guard between them, code in the worker has no relation to the controller, which it could
signal. When the worker exits, or the controller does, the guard kills all that the worker has
started. It imports neither torch nor Ray nor the program that started it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from rlctl.runtime.sandbox.limits import adopt_orphans, die_with, kill_children


def run_guarded(work: Callable[[], None], descriptor: int, parent: int) -> None:
    """Fork a worker that calls `work`; guard it until it or `parent` exits.

    The guard closes the connection `descriptor`. Returns in the worker when `work` does; exits in
    the guard.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pool
    signal.signal(signal.SIGTERM, _leave)
    die_with(parent, signal.SIGTERM)
    adopt_orphans()
    guard = os.getpid()
    worker = os.fork()
    if worker != 0:
        os.close(descriptor)
        sys.exit(_guard(worker))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    die_with(guard, signal.SIGKILL)
    work()


def _leave(signum: int, frame: object) -> None:
    del signum, frame
    sys.exit()


def _guard(worker: int) -> int:
    """Wait for `worker`, kill what it leaves, and return its exit status as a shell would."""
    with suppress(SystemExit):  # SIGTERM
        while (ended := _next_exit()) != worker:
            os.waitpid(ended, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_children(worker)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    return code if code >= 0 else 128 - code


def _next_exit() -> int:
    """Wait for a child that exits and return its number, without reaping it."""
    result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert result is not None, "only with WNOHANG"
    return result.si_pid
