"""Workers that run calls of reward functions: a lane for synchronous and one for asynchronous ones.

A lane replaces a worker that exits or hangs; only the calls in progress fail. Calls have numbers,
and results come in any order.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from rlctl.runtime.rewards.async_worker import TICK_S
from rlctl.runtime.rewards.functions import Call, CallResult
from rlctl.runtime.rewards.messages import decoded_results
from rlctl.runtime.rewards.worker_process import GRACE_S, WorkerProcess

# Portions of the waiting calls per worker: few messages, and a short wait for the slowest worker.
PORTIONS = 4

# Ends a worker and returns its exit status and another one.
Replace = Callable[[WorkerProcess], tuple[int, WorkerProcess]]


class Task(NamedTuple):
    """Calls of a function, by its index in the workers: those of a group, or one."""

    number: int
    function: int
    calls: Sequence[Call]


class TaskResult(NamedTuple):
    """Results of a task, one for each of its calls."""

    number: int
    results: list[CallResult]


class Lane(Protocol):
    """Workers that run tasks."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue tasks."""
        ...

    def advance(self) -> list[TaskResult]:
        """Send waiting tasks and return the results that have arrived, without waiting."""
        ...

    def drop_waiting(self) -> None:
        """Forget the tasks that no worker has; results of the others still arrive."""
        ...

    @property
    def connections(self) -> list[Connection]:
        """Connections on which results may arrive."""
        ...

    @property
    def deadline(self) -> float:
        """Time of `time.monotonic` at which `advance` must be called at the latest."""
        ...


def _failed(task: Task, error: str, *, timed_out: bool = False) -> TaskResult:
    return TaskResult(task.number, [CallResult(0.0, {}, error, timed_out)] * len(task.calls))


@dataclass
class _Job:
    """Tasks of a busy worker; the first one has no result yet."""

    worker: WorkerProcess
    tasks: deque[Task]
    deadline: float  # of the first task


class SyncLane(Lane):
    """Workers that run one call at a time.

    An alarm inside the worker interrupts a call that hangs in Python; otherwise the lane kills the
    worker.
    """

    def __init__(self, workers: list[WorkerProcess], replace: Replace, timeout_s: float) -> None:
        self._workers, self._replace_worker, self._timeout_s = workers, replace, timeout_s
        self._waiting: deque[Task] = deque()
        self._busy: dict[Connection, _Job] = {}

    def submit(self, tasks: Sequence[Task]) -> None:
        """See `Lane`."""
        self._waiting += tasks

    def advance(self) -> list[TaskResult]:
        """See `Lane`."""
        results = [each for job in list(self._busy.values()) for each in self._collect(job)]
        self._dispatch()
        return results

    def drop_waiting(self) -> None:
        """See `Lane`."""
        self._waiting.clear()

    @property
    def connections(self) -> list[Connection]:
        """See `Lane`."""
        return list(self._busy)

    @property
    def deadline(self) -> float:
        """See `Lane`."""
        return min((job.deadline for job in self._busy.values()), default=math.inf)

    def _dispatch(self) -> None:
        """Send a portion of the waiting tasks to each idle worker."""
        for worker in [each for each in self._workers if each.connection not in self._busy]:
            if not self._waiting:
                return
            size = math.ceil(len(self._waiting) / (PORTIONS * len(self._workers)))
            tasks = [self._waiting.popleft() for _ in range(size)]
            if worker.process.poll() is not None:  # it exited while idle
                worker = self._replace(worker)[1]
            with suppress(OSError):  # it has exited since: `_collect` finds the closed connection
                worker.connection.send([(each.function, each.calls) for each in tasks])
            self._busy[worker.connection] = _Job(worker, deque(tasks), self._new_deadline())

    def _collect(self, job: _Job) -> list[TaskResult]:
        """Collect the results of a job; replace its worker if it has exited or hangs."""
        connection, found = job.worker.connection, []
        lost: TaskResult | None = None
        try:
            while job.tasks and connection.poll():
                results = decoded_results(job.worker.receive(), len(job.tasks[0].calls))
                found.append(TaskResult(job.tasks.popleft().number, results))
                job.deadline = self._new_deadline()
        except (EOFError, OSError, ValueError, TypeError):  # exited, or wrote something else
            status = self._replace(job.worker)[0]
            lost = _failed(job.tasks[0], f"the reward worker exited (exit status {status})")
        else:
            if job.tasks and time.monotonic() > job.deadline:
                self._replace(job.worker)
                error = f"took longer than {self._timeout_s:g} s and could not be interrupted"
                lost = _failed(job.tasks[0], error, timed_out=True)
        if lost is not None:
            found.append(lost)
            job.tasks.popleft()
            self._waiting.extendleft(reversed(job.tasks))
        if lost is not None or not job.tasks:
            del self._busy[connection]
        return found

    def _replace(self, worker: WorkerProcess) -> tuple[int, WorkerProcess]:
        self._workers.remove(worker)
        status, other = self._replace_worker(worker)
        self._workers.append(other)
        return status, other

    def _new_deadline(self) -> float:
        return time.monotonic() + self._timeout_s + GRACE_S


class AsyncLane(Lane):
    """One worker with an event loop, which gets all calls at once and limits them itself."""

    def __init__(self, worker: WorkerProcess, replace: Replace, timeout_s: float) -> None:
        self._worker, self._replace_worker = worker, replace
        self._silence_s = timeout_s + TICK_S + GRACE_S
        self._waiting: list[Task] = []
        self._open: dict[int, Task] = {}
        self._heard_at = 0.0

    def submit(self, tasks: Sequence[Task]) -> None:
        """See `Lane`."""
        self._waiting += tasks

    def advance(self) -> list[TaskResult]:
        """See `Lane`."""
        found: list[TaskResult] = []
        lost: str | None = None
        try:
            while self._open and self._worker.connection.poll():
                message = self._worker.receive()
                self._heard_at = time.monotonic()
                if message is not None:
                    task = self._open[message[0]]
                    found.append(
                        TaskResult(task.number, decoded_results(message[1], len(task.calls)))
                    )
                    del self._open[task.number]
        except (EOFError, OSError, ValueError, TypeError, LookupError):
            lost = "the reward worker exited (exit status {})"
        else:
            if self._open and time.monotonic() > self.deadline:
                lost = "the event loop of the reward functions is blocked"
        if lost is not None:
            error = lost.format(self._restart())
            found += [_failed(each, error) for each in self._open.values()]
            self._open = {}
        self._send()
        return found

    def drop_waiting(self) -> None:
        """See `Lane`."""
        self._waiting = []

    @property
    def connections(self) -> list[Connection]:
        """See `Lane`."""
        return [self._worker.connection] if self._open else []

    @property
    def deadline(self) -> float:
        """See `Lane`."""
        return self._heard_at + self._silence_s if self._open else math.inf

    def _send(self) -> None:
        if self._waiting and self._worker.process.poll() is not None:  # it exited while idle
            self._restart()
        for task in self._waiting:
            if not self._open:
                self._heard_at = time.monotonic()
            self._open[task.number] = task
            with suppress(OSError):  # it has exited since: the connection is found closed
                self._worker.connection.send(tuple(task))
        self._waiting = []

    def _restart(self) -> int:
        status, self._worker = self._replace_worker(self._worker)
        return status
