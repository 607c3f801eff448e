"""Pool that scores responses with one or more reward functions; no function can stop a run.

Entry points declared `in_process` are called directly. All other functions run in worker processes
that start once per run: synchronous ones in several, asynchronous ones on the event loop of one, so
that the limits of their requests are those of the run. A call that raises, returns no number, hangs
or kills its process scores 0 and is counted.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import InternalError
from rlctl.recipes import schema
from rlctl.runtime.rewards.functions import (
    Call,
    CallResult,
    LoadedReward,
    RewardSpec,
    is_user_code,
    runs_in_process,
)
from rlctl.runtime.rewards.lanes import AsyncLane, Lane, SyncLane, Task
from rlctl.runtime.rewards.loading import find_reward, load_reward, needed_environment
from rlctl.runtime.rewards.report import RewardReport
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.rewards.scoring import OnResult, Scoring
from rlctl.runtime.rewards.specs import check_sources, reward_specs
from rlctl.runtime.rewards.worker import ASYNC, SYNC, Setup
from rlctl.runtime.rewards.worker_process import START_S, WorkerProcess
from rlctl.runtime.sandbox.limits import GIB, Limits, default_memory, withheld_variable


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
        requests: RequestSettings | None = None,
    ) -> None:
        """Load `functions` and start the workers, if any function needs them.

        `timeout_s` is the time limit of a call, and of the first import of a user's code, in
        seconds. Output of functions goes to `reward-<number>.log` in the folder `logs`, or to
        stderr. `env` names environment variables that workers get besides the usual ones, and those
        that a function asks for. `requests` limits the requests of asynchronous functions. Raises
        ConfigError if a function cannot be loaded or called, ResourceError if a worker does not
        start.
        """
        self.functions = list(functions)
        self.direct: dict[int, LoadedReward] = {
            index: load_reward(spec)
            for index, spec in enumerate(self.functions)
            if not is_user_code(spec.function) and runs_in_process(find_reward(spec.function))
        }
        self.traits = {index: each.traits for index, each in self.direct.items()}
        self._pooled = [i for i in range(len(self.functions)) if i not in self.direct]
        specs = [self.functions[index] for index in self._pooled]
        self._env = [*env, *(name for spec in specs for name in needed_environment(spec))]
        self._setup = Setup(
            specs, timeout_s, timeout_s, limits or Limits(), requests or RequestSettings()
        )
        self._numbers = itertools.count()
        self._processes: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._processes)
        self.lanes: list[Lane] = []
        if self._pooled:
            self._sync_lane, self._async_lane = self._start_lanes(num_processes, logs)
            self.lanes += [each for each in (self._sync_lane, self._async_lane) if each]

    @classmethod
    def from_config(
        cls,
        reward: schema.Reward,
        sources: Iterable[str],
        num_processes: int,
        logs: Path | None = None,
        requests: RequestSettings | None = None,
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
            requests=requests,
        )

    def score(
        self,
        rows: Sequence[PromptRow],
        responses: Sequence[str],
        on_result: OnResult | None = None,
        groups: Sequence[int] | None = None,
    ) -> RewardReport:
        """Return the scores of `responses`, one for each of `rows`.

        `groups` has the number of each row's group; None: each row is one. Raises ConfigError for a
        row whose data source no function scores.
        """
        check_sources(self.functions, (row.data_source for row in rows))
        try:
            scoring = self.open(range(len(rows)) if groups is None else groups)
            for number, (row, text) in enumerate(zip(rows, responses, strict=True)):
                scoring.add(number, row, text)
            return scoring.finish(on_result)
        except BaseException:
            self.close()  # a worker cannot be used again while a call is in progress
            raise

    def open(self, groups: Sequence[int]) -> Scoring:
        """Begin to score a batch; one that has not been finished is given up."""
        for lane in self.lanes:
            lane.drop_waiting()
        return Scoring(self, groups)

    def submit(self, index: int, calls: Sequence[Call]) -> int:
        """Queue calls of the function `index` for its lane; return their number."""
        if not self._finalizer.alive:
            raise InternalError("the reward pool is closed")
        lane = self._async_lane if self.traits[index].is_async else self._sync_lane
        assert lane is not None, "there is a lane for each kind of function"
        task = Task(next(self._numbers), self._pooled.index(index), calls)
        lane.submit([task])
        return task.number

    def explained(self, result: CallResult) -> CallResult:
        """Return a result whose error names the setting for a variable that is not passed on."""
        name = result.error and withheld_variable(result.error, self._env)
        if not name:
            return result
        hint = f"{name} is set, but reward code gets it only with reward.env=[{name}]"
        return result._replace(error=f"{result.error}; {hint}")

    def close(self) -> None:
        """Kill the workers. Further calls do nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start_lanes(
        self, num_processes: int, logs: Path | None
    ) -> tuple[SyncLane | None, AsyncLane | None]:
        """Start one worker, which gives the traits of the functions, and the others they need."""

        def path(name: object) -> Path | None:
            return logs and logs / f"reward-{name}.log"

        (first,) = self._start([path(0)], self._setup)
        self.traits |= dict(zip(self._pooled, first.traits, strict=True))
        is_async = [self.traits[index].is_async for index in self._pooled]
        again = self._setup._replace(import_s=START_S)
        timeout_s = self._setup.timeout_s
        sync_lane = async_lane = None
        if not all(is_async):
            others = self._start([path(number) for number in range(1, num_processes)], again)
            workers = [first, *others]
            for worker in workers:
                worker.begin(SYNC)
            sync_lane = SyncLane(workers, lambda each: self._replace(each, SYNC), timeout_s)
        if any(is_async):
            worker = first if all(is_async) else self._start([path(ASYNC)], again)[0]
            worker.begin(ASYNC)
            async_lane = AsyncLane(worker, lambda each: self._replace(each, ASYNC), timeout_s)
        return sync_lane, async_lane

    def _start(self, logs: Sequence[Path | None], setup: Setup) -> list[WorkerProcess]:
        """Start one worker for each of `logs`; close the pool if one does not start."""
        started = [WorkerProcess(log, self._env) for log in logs]
        self._processes += started
        try:
            for worker in started:
                worker.load(setup)
        except BaseException:
            self.close()
            raise
        return started

    def _replace(self, worker: WorkerProcess, mode: str) -> tuple[int, WorkerProcess]:
        """End a worker and start another one. Return the exit status of the former."""
        self._processes.remove(worker)
        status = worker.kill()
        (other,) = self._start([worker.log], self._setup._replace(import_s=START_S))
        other.begin(mode)
        return status, other


def _kill_all(workers: list[WorkerProcess]) -> None:
    """Kill and forget all workers. A plain function: a finalizer must not refer to the pool."""
    for worker in workers:
        worker.terminate()
    while workers:
        workers.pop().kill()
