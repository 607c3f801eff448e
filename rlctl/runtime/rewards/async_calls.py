"""Calls of asynchronous reward functions on the event loop of one worker."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from rlctl.runtime.rewards import chat_client
from rlctl.runtime.rewards.functions import (
    Call,
    CallResult,
    LoadedReward,
    RewardTimeout,
    call_async,
    to_failure,
)
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.rewards.reward_host import TICK_S
from rlctl.runtime.sandbox.calls import limited
from rlctl.runtime.sandbox.process_limits import limit_cpu


class AsyncCalls:
    """Calls with the limits of `requests`; `timeout_s` limits one. Built on the running loop."""

    def __init__(self, timeout_s: float, requests: RequestSettings) -> None:
        self._timeout_s = timeout_s
        self._requests = requests
        self._calls: set[asyncio.Task[list[CallResult]]] = set()  # of users' code
        self._client = chat_client.install(requests)
        signal.signal(signal.SIGALRM, self._interrupt)
        self._ticking = asyncio.create_task(self._tick())

    async def call(self, reward: LoadedReward, calls: Sequence[Call]) -> list[CallResult]:
        """Call a function for one call or the calls of a group."""
        if reward.traits.limits_requests:
            return await self._limited(reward, calls, None)
        async with self._client.limiter.slot(self._requests.tokens_per_call):
            return await self._limited(reward, calls, self._timeout_s)

    async def _limited(
        self, reward: LoadedReward, calls: Sequence[Call], timeout_s: float | None
    ) -> list[CallResult]:
        """Run a call as a task, which need not end when it is cancelled."""
        task = asyncio.ensure_future(call_async(reward, calls))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await limited(task, timeout_s)
        except RewardTimeout as timeout:  # raised by the alarm at the end of the call
            failure = to_failure(timeout)
        except TimeoutError:
            failure = to_failure(RewardTimeout(f"took longer than {timeout_s:g} s"))
        except asyncio.CancelledError:
            failure = to_failure(RuntimeError("the call was cancelled"))
        return [failure] * len(calls)

    async def _tick(self) -> None:
        """Postpone the alarm and the limit of CPU time for as long as the loop is not blocked."""
        while True:
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s + TICK_S)
            limit_cpu(self._timeout_s + TICK_S)
            await asyncio.sleep(TICK_S)

    def _interrupt(self, *_: object) -> None:
        """Raise RewardTimeout in a call that blocks the loop."""
        if asyncio.current_task() in self._calls:
            raise RewardTimeout(f"blocked the event loop for longer than {self._timeout_s:g} s")
