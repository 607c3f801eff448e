"""Guard of a process that runs others' code: its parent, which ends all that it has started."""

from __future__ import annotations

import os
import signal

from rlctl.runtime.sandbox.process_limits import adopt_orphans, die_with, kill_children

_ENDINGS = {signal.SIGTERM, signal.SIGCHLD}
_REAPED: dict[int, int] = {}  # status of children that have ended: see `_has_exited`


def fork_guarded() -> int:
    """Fork a new session. Return its number in this process, its guard, and 0 in the child.

    Orphans of the child become children of the guard. The child dies with it.
    """
    # The guard takes signals from its queue: a handler could run at any moment of `guard`, and the
    # kernel sends SIGTERM once per thread of a parent that exits, while the worker may exit, too.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
    adopt_orphans()
    parent = os.getpid()
    if worker := os.fork():
        return worker
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.setsid()
    # The parent of the first process of a namespace has no number in it.
    die_with(os.getppid() and parent, signal.SIGKILL)
    return 0


def guard(worker: int) -> int:
    """Wait for `worker` or SIGTERM, kill all children, and return the status as a shell would."""
    while not _has_exited(worker) and signal.sigwait(_ENDINGS) == signal.SIGCHLD:
        pass
    if os.getpid() == 1:  # of a namespace: the kernel ends the others, and /proc may not have them
        os.kill(worker, signal.SIGKILL)
    else:
        kill_children(worker)
    status = _REAPED[worker] if worker in _REAPED else os.waitpid(worker, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return 128 - code
    return code


def _has_exited(worker: int) -> bool:
    """Return True if the child `worker` has exited, without reaping it; reap the others.

    Where the system cannot leave it unreaped (macOS before Python 3.13), its status is kept.
    """
    if not hasattr(os, "waitid"):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _REAPED[ended[0]] = ended[1]
            if ended[0] == worker:
                return True
        return False
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == worker:
            return True
        os.waitpid(ended.si_pid, 0)
    return False
