"""Event loop of the process that runs a run's asynchronous reward functions.

All of them share this process, so that limits of requests are those of the run. A call's time limit
begins when the call does. A call that blocks the loop is interrupted by an alarm.
"""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from rlctl.runtime.rewards import chat_client
from rlctl.runtime.rewards.functions import (
    Call,
    CallResult,
    LoadedReward,
    RewardTimeout,
    call_async,
    to_failure,
)
from rlctl.runtime.rewards.messages import encoded
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.sandbox.limits import limit_cpu

# Interval of the messages that show that the loop is not blocked.
TICK_S = 1.0


def serve_async(
    connection: Connection,
    loaded: Sequence[LoadedReward],
    timeout_s: float,
    requests: RequestSettings,
) -> None:
    """Run calls from `connection` until it closes.

    A message to the process is a number, the index of a function and calls; the reply is the number
    and results. Between replies the process sends null while it has calls.
    """
    asyncio.run(_Server(connection, loaded, timeout_s, requests).run())


class _Server:
    """Calls in progress, and the threads that read and write the connection."""

    def __init__(
        self,
        connection: Connection,
        loaded: Sequence[LoadedReward],
        timeout_s: float,
        requests: RequestSettings,
    ) -> None:
        self.connection, self.loaded, self.timeout_s = connection, loaded, timeout_s
        self.client = chat_client.install(requests)
        self.calls: set[asyncio.Task[None]] = set()
        self.tasks: set[asyncio.Task[list[CallResult]]] = set()  # of users' code
        self.outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    async def run(self) -> None:
        """Serve until the connection closes."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        # Both threads always move data, so that neither process waits for the other's buffer.
        def read() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(self._start, *self.connection.recv())
            except (EOFError, OSError):
                loop.call_soon_threadsafe(closed.set)

        def write() -> None:
            try:
                while True:
                    self.connection.send_bytes(self.outbox.get())
            except OSError:
                loop.call_soon_threadsafe(closed.set)

        for target in (read, write):
            threading.Thread(target=target, daemon=True).start()
        signal.signal(signal.SIGALRM, self._interrupt)
        while not closed.is_set():
            if self.calls:
                self.outbox.put(encoded(None))
            signal.setitimer(signal.ITIMER_REAL, self.timeout_s + TICK_S)
            limit_cpu(self.timeout_s + TICK_S)
            try:
                await asyncio.wait_for(closed.wait(), TICK_S)
            except TimeoutError:
                continue
        signal.setitimer(signal.ITIMER_REAL, 0)
        await self.client.close()

    def _start(self, number: int, index: int, calls: Sequence[Call]) -> None:
        task = asyncio.get_running_loop().create_task(self._call(number, index, calls))
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)

    async def _call(self, number: int, index: int, calls: Sequence[Call]) -> None:
        reward = self.loaded[index]
        if reward.traits.limits_requests:
            results = await self._guarded(reward, calls, None)
        else:
            async with self.client.limiter.slot(self.client.settings.tokens_per_call):
                results = await self._guarded(reward, calls, self.timeout_s)
        self.outbox.put(encoded((number, results)))

    async def _guarded(
        self, reward: LoadedReward, calls: Sequence[Call], timeout_s: float | None
    ) -> list[CallResult]:
        """Run a call as a task, which need not end when it is cancelled."""
        task = asyncio.ensure_future(call_async(reward, calls))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            task.cancel()
            error: BaseException = RewardTimeout(f"took longer than {timeout_s:g} s")
        elif task.cancelled():
            error = RuntimeError("the call was cancelled")
        elif (found := task.exception()) is not None:
            error = found
        else:
            return task.result()
        return [to_failure(error)] * len(calls)

    def _interrupt(self, signum: int, frame: object) -> None:
        """Raise RewardTimeout in a call that blocks the loop."""
        del signum, frame
        if asyncio.current_task() in self.tasks:
            raise RewardTimeout(f"blocked the event loop for longer than {self.timeout_s:g} s")
