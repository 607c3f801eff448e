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

from rlctl.runtime.sandbox.limits import adopt_orphans, die_with, kill_children

_ENDINGS = {signal.SIGTERM, signal.SIGCHLD}


def run_guarded(work: Callable[[], None], descriptor: int, parent: int) -> None:
    """Fork a worker that calls `work`; guard it until it or `parent` exits.

    The guard closes the connection `descriptor`. Returns in the worker when `work` does; exits in
    the guard.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pool
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The guard takes signals from its queue: a handler could run at any moment of `_guard`, and the
    # kernel sends SIGTERM once per thread of a parent that exits, while the worker may exit, too.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
    die_with(parent, signal.SIGTERM)
    adopt_orphans()
    guard = os.getpid()
    worker = os.fork()
    if worker != 0:
        os.close(descriptor)
        sys.exit(_guard(worker))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.setsid()
    die_with(guard, signal.SIGKILL)
    work()


def _guard(worker: int) -> int:
    """Wait for `worker`, kill what it leaves, and return its exit status as a shell would."""
    while not _has_exited(worker) and signal.sigwait(_ENDINGS) == signal.SIGCHLD:
        pass
    kill_children(worker)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    return code if code >= 0 else 128 - code


def _has_exited(worker: int) -> bool:
    """Return True if the child `worker` has exited, without reaping it; reap the others."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == worker:
            return True
        os.waitpid(ended.si_pid, 0)
    return False
