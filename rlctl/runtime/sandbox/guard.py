"""Guard of a worker process: its parent, which the controller starts and which forks it.

With a guard between them, code in the worker has no relation to the controller, which it could
signal. When the worker exits, or the controller does, the guard kills all that the worker has
started. It also copies the worker's output, so that no limit of the worker and no error of the log
reaches code that prints. It imports neither torch nor Ray nor the program that started it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

from rlctl.runtime.sandbox.limits import adopt_orphans, die_with, kill_children

_ENDINGS = {signal.SIGTERM, signal.SIGCHLD}
_STDOUT, _STDERR = 1, 2
_LOG_BYTES = 16 * 2**20  # of a log; a longer one keeps the last half
_NOTE = b"[earlier output was removed: the log is limited to 16 MiB]\n"
_DRAIN_S = 2.0  # time to copy what the worker wrote before it ended


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
    output, writer = os.pipe()
    worker = os.fork()
    if worker != 0:
        os.close(descriptor)
        os.close(writer)
        copying = Thread(target=_copy, args=(output,), daemon=True)
        copying.start()
        status = _guard(worker)
        copying.join(_DRAIN_S)
        sys.exit(status)
    os.close(output)
    os.dup2(writer, _STDOUT)
    os.dup2(writer, _STDERR)
    os.close(writer)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.setsid()
    die_with(guard, signal.SIGKILL)
    work()


def _copy(output: int) -> None:
    """Copy the worker's output to stdout until all writers have ended; drop what fails."""
    mode = fcntl.fcntl(_STDOUT, fcntl.F_GETFL)
    is_log = bool(mode & os.O_APPEND and mode & os.O_RDWR)  # as `GuardedProcess` opens it
    is_log &= stat.S_ISREG(os.fstat(_STDOUT).st_mode)
    while text := os.read(output, 2**16):
        with suppress(OSError):
            if is_log and (size := os.fstat(_STDOUT).st_size) > _LOG_BYTES:
                half = _LOG_BYTES // 2
                text = _NOTE + os.pread(_STDOUT, half, size - half) + text
                os.ftruncate(_STDOUT, 0)
            while text:
                text = text[os.write(_STDOUT, text) :]


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
