"""Worker processes that run calls of reward functions.

Several workers run synchronous functions, one call at a time; one worker runs all asynchronous
ones, gets all calls at once and limits them itself. A worker that exits or hangs is replaced, and
only the calls in progress fail.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlctl.errors import ConfigError
from rlctl.redaction import registered_in
from rlctl.runtime.rewards.functions import (
    TIMEOUT_HINT,
    Call,
    CallResult,
    RewardSpec,
    Traits,
    is_user_code,
)
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.rewards.reward_host import TICK_S, RewardHost
from rlctl.runtime.sandbox import worker_process
from rlctl.runtime.sandbox.process_limits import allowed_environment, withheld_variable
from rlctl.runtime.sandbox.worker_pool import WorkerPool
from rlctl.runtime.sandbox.worker_process import RequestFailed, Worker, WorkerLost
from rlctl.runtime.sandbox.worker_settings import WorkerSettings

# Portions of the waiting calls per worker: few messages, and a short wait for the slowest worker.
PORTIONS = 4


@dataclass(frozen=True, eq=False)
class _Task:
    """Calls of a synchronous function, by its position: one call, or all of a group."""

    function: int
    calls: Sequence[Call]
    batch: int
    results: asyncio.Future[list[CallResult]]
    is_repeated: bool = False  # its first process was killed or stopped from outside


class RewardWorkers:
    """Workers of the functions `specs`, which have the `traits`."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        timeout_s: float,
        settings: WorkerSettings,
        requests: RequestSettings,
    ) -> None:
        """Prepare the workers that `start` starts."""
        self.traits: list[Traits] = []
        self._specs = specs
        self._settings = settings
        self._timeout_s = self._import_s = timeout_s
        self._waiting: asyncio.Queue[_Task] = asyncio.Queue()
        self._lanes: list[asyncio.Task[None]] = []
        self._async_worker: Worker | None = None
        self._batch = 0
        environment = allowed_environment(os.environ, settings.env)
        # Only those that the workers have: users' code in them must not get others.
        secrets = registered_in([[spec.kwargs for spec in specs], environment])
        host = partial(RewardHost, timeout_s, requests, settings.logs is not None, secrets)
        self.pool = WorkerPool("reward", settings, host, self._load)

    def start(self) -> None:
        """Start one worker, which gives the traits of the functions, and the others they need.

        Raises the error of a function that cannot be loaded or called, and ResourceError.
        """
        self.pool.submit(self._start).result()

    def submit(self, function: int, calls: Sequence[Call]) -> Future[list[CallResult]]:
        """Call a function, by its position; return the future of its results."""
        run = self._run_async if self.traits[function].is_async else self._run
        return self.pool.submit(run, function, calls, self._batch)

    def drop_waiting(self) -> None:
        """Forget the calls that no worker has; they have no results."""
        self._batch += 1

    async def _start(self) -> None:
        first = self.pool.start(0)
        self.traits = await first.started
        self._import_s = worker_process.START_S  # they are known to load
        is_async = [traits.is_async for traits in self.traits]
        workers = [first]
        if not all(is_async):
            workers += [self.pool.start(number) for number in range(1, self._settings.number)]
            self._lanes += [asyncio.create_task(self._serve(worker)) for worker in workers]
        if any(is_async):
            self._async_worker = first if all(is_async) else self.pool.start("async")
            self._async_worker.silence_s = self._timeout_s + TICK_S + worker_process.GRACE_S
            workers.append(self._async_worker)
        await asyncio.gather(*(worker.started for worker in workers))

    async def _load(self, worker: Worker) -> list[Traits]:
        """Load the functions in a worker and return their traits."""
        import_s = self._import_s
        return [await self._load_one(worker, spec, import_s) for spec in self._specs]

    async def _load_one(self, worker: Worker, spec: RewardSpec, import_s: float) -> Traits:
        """Load a function. Raises ConfigError, also if its import cannot be interrupted."""
        is_limited = is_user_code(spec.function)
        limit_s = import_s + worker_process.GRACE_S if is_limited else worker_process.START_S
        try:
            return Traits(*await worker.request("load", limit_s, spec=spec, import_s=import_s))
        except TimeoutError:
            raise ConfigError(
                f"the import of the reward function {spec.function!r} took longer than "
                f"{import_s:g} s and could not be interrupted",
                hint=TIMEOUT_HINT,
            ) from None
        except RequestFailed as failure:
            error = failure.error
            if error is not None and (name := withheld_variable(str(error), self._settings.env)):
                hint = f"reward.env=[{name}] passes it on"
                raise ConfigError(replace(error.problems[0], hint=hint)) from None
            raise

    async def _run(self, function: int, calls: Sequence[Call], batch: int) -> list[CallResult]:
        """Queue calls of a synchronous function and return their results."""
        task = _Task(function, calls, batch, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(task)
        return await task.results

    async def _serve(self, worker: Worker) -> None:
        """Send portions of the waiting calls to a worker, which is replaced if it is lost."""
        while True:
            tasks = deque([await self._waiting.get()])
            for _ in range(self._waiting.qsize() // (PORTIONS * len(self._lanes))):
                tasks.append(self._waiting.get_nowait())
            worker = self.pool.alive(worker)
            try:
                await self._process(worker, tasks)
            except Exception as error:
                for task in tasks:
                    task.results.set_exception(error)
            else:
                for task in tasks:
                    self._waiting.put_nowait(task)

    async def _process(self, worker: Worker, tasks: deque[_Task]) -> None:
        """Remove tasks when they have results. If one loses the worker, the later ones remain."""
        for task in [task for task in tasks if task.batch != self._batch]:
            task.results.set_result([])
            tasks.remove(task)
        limit_s = self._timeout_s + worker_process.GRACE_S
        timed_out = False
        calls = [(task.function, task.calls) for task in tasks]
        try:
            await asyncio.shield(worker.started)
            with worker.send("call", tasks=calls) as receive:
                while tasks:
                    results = _to_results(await receive(limit_s), tasks[0].calls)
                    tasks.popleft().results.set_result(results)
                return
        except TimeoutError:
            error = f"took longer than {self._timeout_s:g} s and could not be interrupted"
            timed_out = True
        except (WorkerLost, RequestFailed, ValueError) as failure:
            error = str(failure)
        await worker.lose(error)
        task = tasks.popleft()
        if worker.was_interrupted and not task.is_repeated:
            tasks.appendleft(replace(task, is_repeated=True))
            return
        task.results.set_result(_failures(task.calls, error, timed_out))

    async def _run_async(
        self, function: int, calls: Sequence[Call], batch: int, repeats: bool = True
    ) -> list[CallResult]:
        """Call an asynchronous function, unless its batch is given up."""
        if batch != self._batch:
            return []
        assert self._async_worker is not None, "an asynchronous function has a worker"
        worker = self._async_worker = self.pool.alive(self._async_worker)
        try:
            reply = await worker.request("call_async", None, index=function, calls=calls)
            return _to_results(reply, calls)
        except (WorkerLost, RequestFailed) as failure:
            if repeats and worker.was_interrupted:
                return await self._run_async(function, calls, batch, repeats=False)
            return _failures(calls, str(failure))
        except ValueError as malformed:
            await worker.lose(str(malformed))
            return _failures(calls, str(malformed))


def _to_results(reply: Any, calls: Sequence[Call]) -> list[CallResult]:
    """Return the results of calls. Raises ValueError if code in the worker sent something else."""
    try:
        results = [CallResult(*result) for result in reply]
    except TypeError:
        results = []
    if len(results) != len(calls):
        raise ValueError("the reward worker sent something else than results")
    return results


def _failures(calls: Sequence[Call], error: str, timed_out: bool = False) -> list[CallResult]:
    return [CallResult(0.0, {}, error, timed_out)] * len(calls)
