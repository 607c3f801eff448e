"""Schedule of a batch of episodes: their turns join the engines' batches as they come.

With the schedule `fixed`, turns join at set steps of the engine, and only when every episode waits
for it. Which responses share a step, and so every rounding difference, then depends on no clock.
With `eager` an engine never waits for tools.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import torch

from rlctl.runtime.generation.policy_engines import FIXED, TurnEngines
from rlctl.runtime.rollout.requests import Completion, Request, Slice

T = TypeVar("T")
OnStates = Callable[[Mapping[str, int]], object]  # number of episodes by state; {} at the end

EAGER = Slice(steps=None, seconds=0.02)


@dataclass(eq=False)
class _Open:
    """A request that engines have, and its responses so far."""

    request: Request
    future: asyncio.Future[list[Completion]]
    responses: list[Completion] = field(default_factory=list)


@dataclass(eq=False)
class Schedule:
    """Passes the requests of coroutines, which ask by `generate` or `complete`, to `engines`.

    `run` ends with its coroutine, `serve` when it is cancelled. `on_states` gets the `states` of
    episodes before each exchange and each pause.
    """

    engines: TurnEngines
    _: KW_ONLY
    fixed: bool
    num_threads: int
    on_states: OnStates = lambda _: None
    states: Counter[str] = field(default_factory=Counter[str])
    busy_s: float = 0.0  # in which the engines had work
    _waiting: list[Request] = field(default_factory=list[Request])
    _open: dict[int, _Open] = field(default_factory=dict[int, _Open])  # by key
    _cancelled: list[int] = field(default_factory=list[int])  # keys that engines still work on
    _num_running: int = 0  # episodes
    _has_ended: bool = False  # no other requests follow
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: Request) -> Completion:
        """Return the only response of a request."""
        return (await self.complete(request))[0]

    async def complete(self, request: Request) -> list[Completion]:
        """Return the n responses of a request, in any order."""
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._open[request.key] = _Open(request, future)
        self._waiting.append(request)
        self._changed.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(request)
            raise

    def _cancel(self, request: Request) -> None:
        """Drop a request whose episode has failed: it must not hold a slot of an engine."""
        if self._open.pop(request.key, None) is None:
            return  # it is complete
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._cancelled.append(request.key)
        self._changed.set()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Serve the requests of `work` and return its result. Raises the first error."""

        async def end_after() -> T:
            try:
                return await work
            finally:
                self._has_ended = True
                self._changed.set()

        # Collections would visit every object of the libraries, for a quarter of a second each.
        gc.freeze()
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(end_after())
                group.create_task(self.serve())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            gc.unfreeze()
        return task.result()

    async def gather(self, episodes: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Play episodes together; return their results in order. Raises the first error."""

        async def count(episode: Coroutine[Any, Any, T]) -> T:
            try:
                return await episode
            finally:
                self._num_running -= 1
                self._changed.set()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(count(episode)) for episode in episodes]
                self._num_running += len(tasks)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [task.result() for task in tasks]

    async def serve(self) -> None:
        """Exchange requests and completions with the engines until the work of `run` has ended.

        Raises errors of the engines; tasks that wait for a response must be cancelled then.
        """
        loop = asyncio.get_running_loop()
        limit = FIXED if self.fixed else EAGER
        # OpenMP's number of threads is a setting of each thread.
        with ThreadPoolExecutor(1, "engines", torch.set_num_threads, (self.num_threads,)) as thread:
            while await self._work():
                requests = self._take_requests()
                cancelled = self._cancelled
                self._cancelled = []
                self._show_states()
                began = time.monotonic()
                completions = await loop.run_in_executor(
                    thread, self.engines.exchange, requests, limit, cancelled
                )
                self.busy_s += time.monotonic() - began
                for completion in completions:
                    self._receive(completion)

    def _take_requests(self) -> list[Request]:
        """Return the requests that the engines get now.

        With `fixed` they are one of each episode in the order of the episodes, which decides which
        share a step. An episode that asks for several at a time gets one after the other: whether
        the second arrives before a step begins would depend on the clock.
        """
        if not self.fixed:
            requests = self._waiting
            self._waiting = []
            return requests
        waiting = {request.key for request in self._waiting}
        submitted = (entry.request for key, entry in self._open.items() if key not in waiting)
        busy = {request.affinity for request in submitted}
        requests: list[Request] = []
        later: list[Request] = []
        for request in self._waiting:
            if request.affinity in busy:
                later.append(request)
            else:
                requests.append(request)
            busy.add(request.affinity)
        self._waiting = later
        return sorted(requests, key=lambda request: request.affinity)

    def _receive(self, completion: Completion) -> None:
        """Add a response to its request; return all of them to the caller once it is complete."""
        found = self._open.get(completion.key)
        if found is None:  # it was dropped
            return
        found.responses.append(completion)
        if len(found.responses) == len(found.request.seeds):
            del self._open[completion.key]
            if not found.future.done():
                found.future.set_result(found.responses)

    async def _work(self) -> bool:
        """Wait until the engines have work; return False once no work is left."""
        while not self._has_ended:
            if self.fixed:
                # An episode may wait for several requests.
                waiting = {entry.request.affinity for entry in self._open.values()}
                if waiting and len(waiting) >= self._num_running:
                    return True
            elif self._open or self._cancelled:
                return True
            self._changed.clear()
            self._show_states()
            await self._changed.wait()
        return bool(self._cancelled)

    def _show_states(self) -> None:
        if self.states:
            self.on_states(+self.states)


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group that is no group."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first
