"""Process for reward functions that may hang or crash: a guard and the worker that it forks.

The guard is the worker's parent, so that reward code has no relation to the controller, which it
could signal. When the worker exits, or the controller does, the guard kills all that the worker has
started. The worker loads the functions and processes lists of calls. It sends one message per
result, so the pool can identify the call in progress. Both import neither torch nor Ray nor the
program that started them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from rlctl.errors import ConfigError, RlctlError
from rlctl.runtime.rewards.functions import (
    Call,
    CallResult,
    RewardSpec,
    RewardTimeout,
    call_reward,
    is_user_code,
)
from rlctl.runtime.rewards.loading import LoadedReward, load_reward, user_line
from rlctl.runtime.rewards.sandbox import Limits, adopt_orphans, die_with, kill_children, restrict

# Longest message of a worker in bytes. Messages are JSON: unpickling would run code that a reward
# function has written.
MAX_MESSAGE = 2**20


class Setup(NamedTuple):
    """The first message to a worker. `import_s` limits the import of a user's file or module."""

    specs: Sequence[RewardSpec]
    timeout_s: float
    import_s: float
    limits: Limits


def main(descriptor: int, parent: int) -> None:
    """Fork a worker for the connection `descriptor`; guard it until it or `parent` exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pool
    signal.signal(signal.SIGTERM, _leave)
    die_with(parent, signal.SIGTERM)
    adopt_orphans()
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        _work(Connection(descriptor), guard)
    else:
        os.close(descriptor)
        sys.exit(_guard(worker))


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


def _work(connection: Connection, guard: int) -> None:
    """Process calls from `connection` until it closes."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    die_with(guard, signal.SIGKILL)
    try:
        _send(connection, os.getpid())
        _serve(connection)
    except (EOFError, ConnectionError):
        return  # the parent has exited or has closed the pool


def _serve(connection: Connection) -> None:
    """Load the functions of the first message, then process lists of calls."""
    setup: Setup = connection.recv()
    restrict(setup.limits)
    loaded: list[LoadedReward] = []
    for spec in setup.specs:
        try:
            loaded.append(_load(spec, setup.import_s))
        except RlctlError as error:
            _send(connection, [type(error).__name__, [list(each) for each in _fields(error)]])
            return
        _send(connection, None)
    while True:
        calls: list[tuple[int, Call]] = connection.recv()
        for index, call in calls:
            _send(connection, _timed(loaded[index], call, setup.timeout_s))


def _fields(error: RlctlError) -> Iterator[tuple[str, str | None, str | None]]:
    for each in error.problems:
        yield each.message, each.where, each.hint


def _send(connection: Connection, message: object) -> None:
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE:
        error = f"the result has {len(data)} bytes, and {MAX_MESSAGE} are allowed"
        data = json.dumps(CallResult(0.0, {}, error)).encode()
    connection.send_bytes(data)


def _load(spec: RewardSpec, import_s: float) -> LoadedReward:
    """Load a function; raise ConfigError if the import of a user's code exceeds `import_s`."""
    if not is_user_code(spec.function):
        return load_reward(spec)
    try:
        with _time_limit(import_s):
            return load_reward(spec)
    except RewardTimeout as timeout:
        raise ConfigError(
            f"the import of the reward function {spec.function!r} {timeout}",
            where=user_line(timeout, spec.function),
            hint="reward.timeout_s=N allows more time",
        ) from timeout


def _timed(reward: LoadedReward, call: Call, timeout_s: float) -> CallResult:
    """Call a function with a time limit."""
    try:
        with _time_limit(timeout_s):
            return call_reward(reward.function, call, reward.kwargs)
    except RewardTimeout as error:  # raised between the end of the call and that of the block
        return CallResult(0.0, {}, str(error), timed_out=True)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise RewardTimeout in the block after `seconds`."""

    def raise_timeout(signum: int, frame: object) -> None:
        del signum, frame
        raise RewardTimeout(f"took longer than {seconds:g} s")

    # Set for every block: a library may have replaced the handler (math-verify does).
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
