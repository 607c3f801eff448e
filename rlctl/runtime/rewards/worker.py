"""Worker process for reward functions that may hang or crash.

It starts once, loads the functions and processes lists of calls. It sends one message per result,
so the pool can identify the call in progress. It imports neither torch nor Ray nor the program that
started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rlctl.errors import RlctlError
from rlctl.runtime.rewards.functions import (
    Call,
    CallResult,
    RewardFunction,
    RewardSpec,
    RewardTimeout,
    call_reward,
    load_reward,
)

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Setup(NamedTuple):
    """The first message to a worker."""

    specs: Sequence[RewardSpec]
    timeout_s: float


def main(descriptor: int, parent: int) -> None:
    """Process calls from the connection `descriptor` until it closes or `parent` exits."""
    _exit_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pool
    connection = Connection(descriptor)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        return  # the parent has exited or has closed the pool


def _serve(connection: Connection) -> None:
    """Load the functions of the first message, then process lists of calls."""
    setup: Setup = connection.recv()
    try:
        functions = [(load_reward(spec), spec.kwargs) for spec in setup.specs]
    except RlctlError as error:
        connection.send(error)
        return
    connection.send(None)  # ready

    def raise_timeout(signum: int, frame: object) -> None:
        del signum, frame
        raise RewardTimeout(f"took longer than {setup.timeout_s:g} s")

    signal.signal(signal.SIGALRM, raise_timeout)
    while True:
        calls: list[tuple[int, Call]] = connection.recv()
        for index, call in calls:
            connection.send(_timed(*functions[index], call, setup.timeout_s))


def _timed(
    function: RewardFunction, kwargs: Mapping[str, Any], call: Call, timeout_s: float
) -> CallResult:
    """Call `function` with a time limit."""
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return call_reward(function, call, kwargs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except RewardTimeout as error:  # raised between the end of the call and the line above
        return CallResult(0.0, {}, str(error), timed_out=True)


def _exit_with(parent: int) -> None:
    """Make this process exit with its parent.

    On Linux the kernel kills it when the thread that started it ends, so the pool must be built in
    a long-lived thread. Elsewhere it exits after the current call, when its connection is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()  # the parent exited before the request
