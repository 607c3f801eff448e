"""Pool that scores responses with one or more reward functions; no function can stop a run.

Entry points declared `in_process` are called directly. All other functions run in worker processes
that start once per run. A call that raises, returns no number, hangs or kills its process scores 0
and is counted. An alarm inside the worker interrupts a call that hangs in Python; otherwise the
pool kills the worker and replaces it.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Self

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import InternalError
from rlctl.recipes import schema
from rlctl.runtime.rewards.functions import (
    Call,
    CallResult,
    RewardSpec,
    call_reward,
    is_user_code,
    runs_in_process,
)
from rlctl.runtime.rewards.loading import find_reward, load_reward
from rlctl.runtime.rewards.report import RewardReport, build_report
from rlctl.runtime.rewards.specs import check_sources, reward_specs
from rlctl.runtime.rewards.worker import Setup
from rlctl.runtime.rewards.worker_process import GRACE_S, START_S, WorkerProcess
from rlctl.runtime.sandbox.limits import GIB, Limits, default_memory

OnResult = Callable[[int, int], object]  # number of results, and of calls

# Portions of a batch per worker: few messages, and a short wait for the slowest worker.
PORTIONS = 4


@dataclass
class _Job:
    """The tasks `next..stop` of a busy worker; `next` is the first one without a result."""

    worker: WorkerProcess
    next: int
    stop: int
    deadline: float  # of time.monotonic()


@dataclass
class _Batch:
    """The state of a batch of tasks, each an index of a function and a call."""

    tasks: list[tuple[int, Call]]
    portions: deque[tuple[int, int]]  # start and stop of ranges of tasks that wait for a worker
    results: list[CallResult | None] = field(init=False)
    busy: dict[Connection, _Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results = [None] * len(self.tasks)

    @property
    def is_done(self) -> bool:
        return not self.portions and not self.busy


class RewardPool:
    """Pool of reward functions, built once per run; `close()` it or use it as a context manager.

    No worker process outlives the program, also if the program is killed.
    """

    def __init__(
        self,
        functions: Sequence[RewardSpec],
        *,
        timeout_s: float,
        num_processes: int,
        logs: Path | None = None,
        env: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> None:
        """Load `functions` and start the workers, if any function needs them.

        `timeout_s` is the time limit of a call, and of the first import of a user's code, in
        seconds. Output of functions goes to `reward-<number>.log` in the folder `logs`, or to
        stderr. `env` names environment variables that workers get besides the usual ones. Raises
        ConfigError if a function cannot be loaded or called, ResourceError if a worker does not
        start.
        """
        self._timeout_s, self._env, self._limits = timeout_s, env, limits or Limits()
        self._specs = list(functions)
        loaded = {
            index: load_reward(spec)
            for index, spec in enumerate(self._specs)
            if not is_user_code(spec.function) and runs_in_process(find_reward(spec.function))
        }
        self._direct = loaded
        self._pooled = [index for index in range(len(self._specs)) if index not in loaded]
        self._workers: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        if self._pooled:
            paths = [logs and logs / f"reward-{number}.log" for number in range(num_processes)]
            self._start(paths[:1], timeout_s)
            self._start(paths[1:], START_S)

    @classmethod
    def from_config(
        cls,
        reward: schema.Reward,
        sources: Iterable[str],
        num_processes: int,
        logs: Path | None = None,
    ) -> Self:
        """Build the pool of a run whose rows have the data `sources`. Raises as the constructor."""
        number, limits = reward.num_processes or num_processes, reward.limits
        memory = None if limits.memory_gb is None else int(limits.memory_gb * GIB)
        return cls(
            reward_specs(reward, sources),
            timeout_s=reward.timeout_s,
            num_processes=number,
            logs=logs,
            env=reward.env,
            limits=Limits(
                memory or default_memory(number), int(limits.file_gb * GIB), limits.open_files
            ),
        )

    def score(
        self,
        rows: Sequence[PromptRow],
        responses: Sequence[str],
        on_result: OnResult | None = None,
    ) -> RewardReport:
        """Return the scores of `responses`, one for each of `rows`.

        Raises ConfigError for a row whose data source no function scores.
        """
        check_sources(self._specs, (row.data_source for row in rows))
        calls = [
            Call(row.data_source, text, row.ground_truth, row.extra_info)
            for row, text in zip(rows, responses, strict=True)
        ]
        tasks = [
            (index, row)
            for index in self._pooled
            for row, call in enumerate(calls)
            if self._specs[index].scores(call.data_source)
        ]
        results: list[list[CallResult | None]] = [[None] * len(calls) for _ in self._specs]
        for index, reward in self._direct.items():
            for row, call in enumerate(calls):
                if self._specs[index].scores(call.data_source):
                    results[index][row] = call_reward(reward.function, call, reward.kwargs)
        pending = [(self._pooled.index(index), calls[row]) for index, row in tasks]
        for (index, row), result in zip(tasks, self._run(pending, on_result), strict=True):
            results[index][row] = result
        return build_report(self._specs, results)

    @property
    def functions(self) -> list[RewardSpec]:
        """The reward functions of the pool."""
        return self._specs

    def close(self) -> None:
        """Kill the workers. Further calls do nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self, logs: Sequence[Path | None], import_s: float) -> None:
        """Start one worker for each of `logs`; close the pool if one does not start."""
        started = [WorkerProcess(log, self._env) for log in logs]
        self._workers += started
        specs = [self._specs[index] for index in self._pooled]
        try:
            for worker in started:
                worker.load(Setup(specs, self._timeout_s, import_s, self._limits))
        except BaseException:
            self.close()
            raise

    def _replace(self, worker: WorkerProcess) -> int:
        """End a worker and start another one. Return the exit status of the former."""
        self._workers.remove(worker)
        status = worker.kill()
        self._start([worker.log], START_S)
        return status

    def _run(
        self, tasks: list[tuple[int, Call]], on_result: OnResult | None = None
    ) -> list[CallResult]:
        """Run `tasks` on the workers and return their results in order."""
        if tasks and not self._workers:
            raise InternalError("the reward pool is closed")
        size = max(1, math.ceil(len(tasks) / (PORTIONS * max(1, len(self._workers)))))
        starts = range(0, len(tasks), size)
        batch = _Batch(tasks, deque((start, min(start + size, len(tasks))) for start in starts))
        try:
            while not batch.is_done:
                self._dispatch(batch)
                first_deadline = min(job.deadline for job in batch.busy.values())
                wait(list(batch.busy), max(0.0, first_deadline - time.monotonic()))
                for job in list(batch.busy.values()):
                    self._advance(job, batch)
                if on_result is not None:
                    on_result(sum(each is not None for each in batch.results), len(tasks))
        except BaseException:
            self.close()  # a worker cannot be used again while a call is in progress
            raise
        return [each for each in batch.results if each is not None]

    def _dispatch(self, batch: _Batch) -> None:
        """Send a portion to each idle worker."""
        for worker in [each for each in self._workers if each.connection not in batch.busy]:
            if not batch.portions:
                return
            start, stop = batch.portions.popleft()
            if worker.process.poll() is not None:  # it exited while idle
                self._replace(worker)
                worker = self._workers[-1]
            with suppress(OSError):  # it has exited since: `_advance` finds the closed connection
                worker.connection.send(batch.tasks[start:stop])
            batch.busy[worker.connection] = _Job(worker, start, stop, self._deadline())

    def _advance(self, job: _Job, batch: _Batch) -> None:
        """Collect the results of a job; replace its worker if it has exited or hangs."""
        connection = job.worker.connection
        lost: CallResult | None = None
        try:
            while job.next < job.stop and connection.poll():
                batch.results[job.next] = CallResult(*job.worker.receive())
                job.next += 1
                job.deadline = self._deadline()
        except (EOFError, OSError, ValueError, TypeError):  # exited, or wrote something else
            status = self._replace(job.worker)
            lost = CallResult(0.0, {}, f"the reward worker exited (exit status {status})")
        else:
            if job.next < job.stop and time.monotonic() > job.deadline:
                self._replace(job.worker)
                error = f"took longer than {self._timeout_s:g} s and could not be interrupted"
                lost = CallResult(0.0, {}, error, timed_out=True)
        if lost:
            batch.results[job.next] = lost
            job.next += 1
            if job.next < job.stop:
                batch.portions.appendleft((job.next, job.stop))
        if lost or job.next == job.stop:
            del batch.busy[connection]

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s + GRACE_S


def _kill_all(workers: list[WorkerProcess]) -> None:
    """Kill and forget all workers. A plain function: a finalizer must not refer to the pool."""
    for worker in workers:
        worker.terminate()
    while workers:
        workers.pop().kill()
