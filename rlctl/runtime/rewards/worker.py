"""Worker process for reward functions that may hang or crash.

The worker loads the functions. Then it calls synchronous ones, one at a time, and sends one message
per result, so the pool can identify the call in progress; or it runs an event loop for asynchronous
ones (`async_worker`). It imports neither torch nor Ray nor the program that started it.
"""

from __future__ import annotations

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
    LoadedReward,
    RewardSpec,
    RewardTimeout,
    call_reward,
    is_user_code,
    to_failure,
)
from rlctl.runtime.rewards.loading import load_reward
from rlctl.runtime.rewards.messages import encoded
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.sandbox.errors import error_to_json
from rlctl.runtime.sandbox.guard import run_guarded
from rlctl.runtime.sandbox.limits import Limits, limit_cpu, restrict
from rlctl.runtime.sandbox.user_code import user_line

# The second message to a worker: how it calls functions.
SYNC, ASYNC = "sync", "async"


class Setup(NamedTuple):
    """The first message to a worker. `import_s` limits the import of a user's file or module."""

    specs: Sequence[RewardSpec]
    timeout_s: float
    import_s: float
    limits: Limits
    requests: RequestSettings = RequestSettings()


# Calls of the function with this index: those of a group, or one.
Calls = tuple[int, Sequence[Call]]


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
            _send(connection, {"error": error_to_json(error)})
            return
        _send(connection, {"traits": loaded[-1].traits})
    if connection.recv() == ASYNC:
        from rlctl.runtime.rewards.async_worker import serve_async  # with asyncio, ssl and SQLite

        serve_async(connection, loaded, setup.timeout_s, setup.requests)
        return
    while True:
        tasks: list[Calls] = connection.recv()
        for index, calls in tasks:
            _send(connection, _timed(loaded[index], calls, setup.timeout_s))


def _send(connection: Connection, message: object) -> None:
    connection.send_bytes(encoded(message))


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


def _timed(reward: LoadedReward, calls: Sequence[Call], timeout_s: float) -> list[CallResult]:
    """Call a function with a time limit."""
    try:
        with _time_limit(timeout_s):
            return call_reward(reward, calls)
    except RewardTimeout as error:  # raised between the end of the call and that of the block
        return [to_failure(error)] * len(calls)


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
