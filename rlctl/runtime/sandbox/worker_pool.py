"""Guarded workers whose requests run on the event loop of a thread.

The thread lives as long as the pool, so requests do not depend on the loops of the program that
sends them. No worker outlives the program, also if it is killed.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread, current_thread
from typing import Any, TypeVar

from rlctl.errors import InternalError
from rlctl.runtime.sandbox.worker_process import Worker
from rlctl.runtime.sandbox.worker_settings import Limits, WorkerSettings, default_memory

T = TypeVar("T")

_JOIN_S = 10.0  # the thread ends at once, unless the machine is overloaded


class WorkerPool:
    """Workers of one kind. `submit`, `call` and `close` may be used in any thread.

    `start` is called on the pool's loop.
    """

    def __init__(
        self,
        noun: str,
        settings: WorkerSettings,
        host: Callable[[], object],
        prepare: Callable[[Worker], Awaitable[Any]],
    ) -> None:
        """Start the thread; see `Worker` for the arguments."""
        limits = settings.limits or Limits(default_memory(settings.number), open_files=65536)
        self.settings = replace(settings, limits=limits)
        self._noun = noun
        self._host = host
        self._prepare = prepare
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        thread = Thread(target=asyncio.run, args=(_run(started),), daemon=True)
        thread.start()
        self._loop, stop = started.result()
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, _close, thread, self._loop, stop, self._workers)

    @property
    def workers(self) -> list[Worker]:
        """Workers whose process has not ended."""
        return [worker for worker in self._workers if worker.process.poll() is None]

    def start(self, name: object) -> Worker:
        """Start the worker `name`; its requests wait until it is ready."""
        self._require_open()
        self._workers[:] = self.workers
        worker = Worker(self._noun, name, self.settings, self._host, self._prepare)
        self._workers.append(worker)
        return worker

    def alive(self, worker: Worker) -> Worker:
        """Return `worker`, or another one that is started in its place if it is lost."""
        if not worker.is_lost:
            return worker
        other = self.start(worker.name)
        other.silence_s = worker.silence_s
        return other

    def submit(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Future[T]:
        """Run `function` on the pool's loop. Raises InternalError if the pool is closed."""
        self._require_open()
        return asyncio.run_coroutine_threadsafe(function(*args), self._loop)

    async def call(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run `function` on the pool's loop, and return its result on the running loop."""
        return await asyncio.wrap_future(self.submit(function, *args))

    def close(self) -> None:
        """Kill the workers. Requests in progress are cancelled, further ones are refused."""
        self._finalizer()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise InternalError(f"the {self._noun} pool is closed")


async def _run(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    """Run the loop until the event is set."""
    stop = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), stop))
    await stop.wait()


def _close(
    thread: Thread,
    loop: asyncio.AbstractEventLoop,
    stop: asyncio.Event,
    workers: list[Worker],
) -> None:
    """End the thread and all workers. A finalizer must not refer to the pool."""
    loop.call_soon_threadsafe(stop.set)
    if thread is not current_thread():  # the garbage collector may run this in any thread
        thread.join(_JOIN_S)
    for worker in workers:
        worker.terminate()
    while workers:
        workers.pop().kill()
