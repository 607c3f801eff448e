"""Worker process for reward functions that may hang or crash.

The worker loads the functions and processes lists of calls. It sends one message per result, so the
pool can identify the call in progress. It imports neither torch nor Ray nor the program that
started it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from rlctl.runtime.rewards.loading import LoadedReward, load_reward
from rlctl.runtime.sandbox.errors import error_to_json
from rlctl.runtime.sandbox.guard import run_guarded
from rlctl.runtime.sandbox.limits import Limits, limit_cpu, restrict
from rlctl.runtime.sandbox.user_code import user_line

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
    """Process calls from the connection `descriptor`, under a guard, until `parent` exits."""
    run_guarded(lambda: _work(Connection(descriptor)), descriptor, parent)


def _work(connection: Connection) -> None:
    """Process calls from `connection` until it closes."""
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
            _send(connection, error_to_json(error))
            return
        _send(connection, None)
    while True:
        calls: list[tuple[int, Call]] = connection.recv()
        for index, call in calls:
            _send(connection, _timed(loaded[index], call, setup.timeout_s))


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
    """Raise RewardTimeout in the block after `seconds`, and limit its CPU time."""

    def raise_timeout(signum: int, frame: object) -> None:
        del signum, frame
        raise RewardTimeout(f"took longer than {seconds:g} s")

    # Set for every block: a library may have replaced the handler (math-verify does).
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    limit_cpu(seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
