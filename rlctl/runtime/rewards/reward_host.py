"""Reward functions in a worker process: their import, and calls with time limits.

Synchronous functions are called one at a time in the main thread, where an alarm interrupts a call
that hangs in Python. All asynchronous functions of a run share the event loop of one process, so
that limits of requests are those of the run. A call's time limit begins when the call does.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlctl.errors import ConfigError
from rlctl.plugins.user_code import user_line
from rlctl.redaction import restore
from rlctl.runtime.rewards import functions
from rlctl.runtime.rewards.functions import (
    TIMEOUT_HINT,
    Call,
    CallResult,
    LoadedReward,
    RewardSpec,
    RewardTimeout,
    Traits,
    call_reward,
    is_user_code,
    to_failure,
)
from rlctl.runtime.rewards.loading import load_reward
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.sandbox.process_limits import limit_cpu

if TYPE_CHECKING:
    from rlctl.runtime.rewards.async_calls import AsyncCalls

# Interval at which the event loop shows the alarm that it is not blocked.
TICK_S = 1.0


class RewardHost:
    """Host of the reward functions in one worker; `timeout_s` limits a call.

    With `logs`, the tracebacks of the first failed calls are written to stderr, without the
    registered `secrets`.
    """

    def __init__(
        self,
        timeout_s: float,
        requests: RequestSettings,
        logs: bool = False,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if logs:
            functions.log_failures = ""
        restore(secrets)
        self._timeout_s = timeout_s
        self._requests = requests
        self._rewards: list[LoadedReward] = []
        self._async_calls: AsyncCalls | None = None

    def load(self, spec: RewardSpec, import_s: float) -> Traits:
        """Load the next function; raise ConfigError if the import of user code exceeds a limit."""
        limit = _time_limit(import_s) if is_user_code(spec.function) else nullcontext()
        try:
            with limit:
                reward = load_reward(spec)
        except RewardTimeout as timeout:
            raise ConfigError(
                f"the import of the reward function {spec.function!r} {timeout}",
                where=user_line(timeout, spec.function),
                hint=TIMEOUT_HINT,
            ) from timeout
        self._rewards.append(reward)
        return reward.traits

    def call(self, tasks: Sequence[tuple[int, Sequence[Call]]]) -> Iterator[list[CallResult]]:
        """Call synchronous functions, by position, each for one call or the calls of a group."""
        for index, calls in tasks:
            began = time.monotonic()
            try:
                with _time_limit(self._timeout_s):
                    results = call_reward(self._rewards[index], calls)
            except RewardTimeout as error:  # raised between the end of the call and the block's
                results = [to_failure(error)] * len(calls)
            if results[0].timed_out:
                from rlctl.runtime.sandbox.interruptions import end_if_stopped_since

                end_if_stopped_since(began)
            yield results

    async def call_async(self, index: int, calls: Sequence[Call]) -> list[CallResult]:
        """Call an asynchronous function, by position, for one call or the calls of a group."""
        if self._async_calls is None:
            from rlctl.runtime.rewards.async_calls import AsyncCalls

            self._async_calls = AsyncCalls(self._timeout_s, self._requests)
        return await self._async_calls.call(self._rewards[index], calls)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise RewardTimeout in the block after `seconds`, and limit its CPU time."""

    def raise_timeout(*_: object) -> None:
        raise RewardTimeout(f"took longer than {seconds:g} s")

    # Set for every block: a library may have replaced the handler (math-verify does).
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    limit_cpu(seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
