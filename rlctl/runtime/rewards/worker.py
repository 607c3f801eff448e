"""The process in which reward functions run that are not declared safe: it may hang or die without harm.

It is started once, loads the functions, and then answers lists of calls, one message an answer, so that the pool always knows which
call is being worked on. It imports neither torch nor Ray nor the program that started it.
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
    Answer,
    Call,
    RewardFunction,
    RewardSpec,
    RewardTimeout,
    answer,
    load_reward,
)

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Setup(NamedTuple):
    """The first message to a worker."""

    specs: Sequence[RewardSpec]
    timeout_s: float


def main(descriptor: int, parent: int) -> None:
    """Answer what comes through the connection `descriptor` until it closes; `parent` is the process that must be alive."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes the pool
    connection = Connection(descriptor)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        return  # the parent is gone or has closed the pool


def _serve(connection: Connection) -> None:
    setup: Setup = connection.recv()
    try:
        functions = [(load_reward(spec), spec.kwargs) for spec in setup.specs]
    except RlctlError as error:
        connection.send(error)
        return
    connection.send(None)  # ready

    def ring(signum: int, frame: object) -> None:
        del signum, frame
        raise RewardTimeout(f"took longer than {setup.timeout_s:g} s")

    signal.signal(signal.SIGALRM, ring)
    while True:
        calls: list[tuple[int, Call]] = connection.recv()
        for index, call in calls:
            connection.send(_timed(*functions[index], call, setup.timeout_s))


def _timed(
    function: RewardFunction, kwargs: Mapping[str, Any], call: Call, timeout_s: float
) -> Answer:
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return answer(function, call, kwargs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except RewardTimeout as error:  # it rang between the call's end and the line above
        return Answer(0.0, {}, str(error), timed_out=True)


def _die_with(parent: int) -> None:
    """On Linux the kernel ends this process with the thread that started it, however that ends: build the pool in a thread that stays.

    Elsewhere the closed connection does it, once the call at hand is over.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()  # the parent was gone before that
