"""Calls of users' code in a worker: on the event loop if it is asynchronous, else in a thread.

A call that exceeds its deadline is left alone: a thread cannot be stopped. It is counted, so that
the controller can replace a worker with too many of them.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rlctl.runtime.sandbox.async_functions import is_async

T = TypeVar("T")

_STACK = 2**21  # bytes; a thread's stack counts as memory of the process
_MAX_THREADS = 4096  # idle threads are used again: these are as many as calls at one time
CLOSE_S = 10.0  # time limit of `close` of an environment, unless calls have a lower one
_STOP_S = 1.0  # a cancelled coroutine that has not ended by then counts as abandoned

_call_limit = 60.0
_threads: ThreadPoolExecutor | None = None
_abandoned: set[object] = set()


def num_abandoned() -> int:
    """Return the number of calls that exceeded their deadline and have not ended."""
    return len(_abandoned)


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, synchronous or asynchronous, without blocking the event loop.

    Raises RuntimeError if the function tries to end the process.
    """
    try:
        if is_async(function):
            return await function(*args, **kwargs)
        result = await _in_thread(function, args, kwargs)
        if inspect.isawaitable(result):
            return await result
        return result
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def limited(work: Awaitable[T], seconds: float | None) -> T:
    """Return the result of `work`. Raises TimeoutError after `seconds`, also if it cannot stop."""
    task = asyncio.ensure_future(work)
    began = time.monotonic()
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        _cancel(task)
        raise
    if not done:
        from rlctl.runtime.sandbox.interruptions import end_if_stopped_since

        end_if_stopped_since(began)
        _cancel(task)
        raise TimeoutError
    return task.result()


async def _in_thread(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    def run() -> Any:
        try:
            return function(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt, StopIteration) as error:  # end a loop or a future
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    future = _executor().submit(run)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        _abandon(future)
        raise


def _executor() -> ThreadPoolExecutor:
    global _threads
    if _threads is None:
        threading.stack_size(_STACK)
        _threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="call")
    return _threads


def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel `task`; count it as abandoned for as long as it ignores that."""
    task.cancel()

    def check() -> None:
        if not task.done():
            _abandoned.add(task)
            task.add_done_callback(_abandoned.discard)

    task.get_loop().call_later(_STOP_S, check)
    task.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Look at the error of a task that nobody awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _abandon(future: Future[Any]) -> None:
    if not future.cancel() and not future.done():
        _abandoned.add(future)
        future.add_done_callback(_abandoned.discard)


def set_call_limit(seconds: float) -> None:
    """Set the time limit of one call of a tool in this process."""
    global _call_limit
    _call_limit = seconds


def call_limit() -> float:
    """Return the time limit of one call of a tool, in seconds."""
    return _call_limit
