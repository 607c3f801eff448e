"""Scores answers by one reward function or several; nothing that a function does can stop a run.

Functions declared `in_process` are called directly. All others run in worker processes that are started once: a call that raises,
returns no number, hangs or kills its process scores 0 and is counted. A hang in Python is ended inside the worker by an alarm, any
other by killing the worker, which is then replaced.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Self

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import InternalError, ResourceError, RlctlError
from rlctl.runtime.rewards.functions import (
    Answer,
    Call,
    RewardSpec,
    answer,
    load_reward,
    runs_in_process,
)
from rlctl.runtime.rewards.worker import Setup

log = logging.getLogger(__name__)

# What a worker may take beyond the timeout of a call before it is killed: its own alarm comes first, also on a busy machine.
GRACE_S = 2.0
# What it may take to start: a reward file may import heavy libraries.
START_S = 120.0
# Each worker gets about so many portions of a batch: few messages, and none waits long for the slowest.
PORTIONS = 4

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlctl.runtime.rewards.worker import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


@dataclass(frozen=True)
class RewardResult:
    """The weighted sum of the functions' scores for one answer, what it was made of, and the first thing that went wrong."""

    score: float
    components: dict[str, float]
    error: str | None


@dataclass(frozen=True)
class RewardReport:
    """One result a row. `num_errors` calls raised, died or returned no number; `num_timeouts` took too long; all of them score 0."""

    results: list[RewardResult]
    num_errors: int
    num_timeouts: int
    first_error: str | None

    @property
    def scores(self) -> list[float]:
        return [result.score for result in self.results]

    def components(self) -> dict[str, list[float]]:
        """name -> one value a row; 0 where a row's function did not give it."""
        names = dict.fromkeys(name for result in self.results for name in result.components)
        return {
            name: [result.components.get(name, 0.0) for result in self.results] for name in names
        }


class _Worker:
    """One process and the connection to it."""

    def __init__(self, log: Path | None) -> None:
        self.log = log
        self.connection, theirs = Pipe()
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        with ExitStack() as stack:
            file = None if log is None else stack.enter_context(log.open("ab"))
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2
                if file is None
                else file,  # what a reward function prints is talk: to stderr
                stderr=file,
                start_new_session=True,  # Ctrl-C does not reach it, and what it starts can be ended with it
            )
        theirs.close()

    def ready(self, setup: Setup) -> None:
        """Hand over the functions and wait until they are loaded."""
        problem: RlctlError | None = None
        try:
            self.connection.send(setup)
            if not self.connection.poll(START_S):
                raise ResourceError(f"a reward worker did not start within {START_S:g} s")
            problem = self.connection.recv()
        except (EOFError, OSError) as error:
            raise ResourceError(
                f"a reward worker died while starting (exit status {self.process.wait()})"
            ) from error
        if problem:
            raise problem

    def kill(self) -> int:
        """End it and what it has started; returns its exit status."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()


class RewardPool:
    """Built once a run; `close()` it, or use it as a context manager. No process survives the program, whatever ends it."""

    def __init__(
        self,
        functions: Sequence[RewardSpec],
        *,
        timeout_s: float,
        num_processes: int,
        logs: Path | None = None,
    ) -> None:
        """Load `functions` and start the workers, if any function needs them.

        `timeout_s` seconds are given to each call. What functions print goes to `reward-<number>.log` in the folder `logs`, or to stderr.
        Raises ConfigError when a function cannot be used (see `load_reward`),
        ResourceError when a worker does not start.
        """
        self._timeout_s = timeout_s
        self._specs = list(functions)
        loaded = [load_reward(spec) for spec in self._specs]
        self._direct = {
            index: function for index, function in enumerate(loaded) if runs_in_process(function)
        }
        self._names = _component_names(self._specs)
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        if len(self._direct) < len(self._specs):
            self._start([logs and logs / f"reward-{number}.log" for number in range(num_processes)])

    def score(self, rows: Sequence[PromptRow], responses: Sequence[str]) -> RewardReport:
        """The scores of `responses`, one for each of `rows`."""
        calls = [
            Call(row.data_source, text, row.ground_truth, row.extra_info)
            for row, text in zip(rows, responses, strict=True)
        ]
        pooled = [index for index in range(len(self._specs)) if index not in self._direct]
        tasks = [(index, call) for index in pooled for call in calls]
        pending = iter(self._run(tasks))
        by_function: list[list[Answer]] = []
        for index, spec in enumerate(self._specs):
            if index in self._direct:
                by_function.append(
                    [answer(self._direct[index], call, spec.kwargs) for call in calls]
                )
            else:
                by_function.append([next(pending) for _ in calls])
        return self._report(by_function)

    def close(self) -> None:
        """End the workers. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self, logs: Sequence[Path | None]) -> None:
        started = [_Worker(log) for log in logs]
        self._workers += started
        try:
            for worker in started:
                worker.ready(Setup(self._specs, self._timeout_s))
        except BaseException:
            self.close()
            raise

    def _replace(self, worker: _Worker) -> int:
        self._workers.remove(worker)
        status = worker.kill()
        self._start([worker.log])
        return status

    def _run(self, tasks: list[tuple[int, Call]]) -> list[Answer]:
        """The answers to `tasks`, in order."""
        if tasks and not self._workers:
            raise InternalError("the reward pool is closed")
        answers: list[Answer | None] = [None] * len(tasks)
        size = max(1, math.ceil(len(tasks) / (PORTIONS * max(1, len(self._workers)))))
        portions = deque(
            (start, min(start + size, len(tasks))) for start in range(0, len(tasks), size)
        )
        busy: dict[Connection, _Job] = {}
        try:
            while portions or busy:
                self._hand_out(tasks, portions, busy)
                wait(
                    list(busy),
                    max(0.0, min(job.deadline for job in busy.values()) - time.monotonic()),
                )
                for job in list(busy.values()):
                    self._advance(job, answers, portions, busy)
        except BaseException:
            self.close()  # a worker in the middle of something cannot be used again
            raise
        return [each for each in answers if each is not None]

    def _hand_out(
        self,
        tasks: list[tuple[int, Call]],
        portions: deque[tuple[int, int]],
        busy: dict[Connection, _Job],
    ) -> None:
        for worker in [each for each in self._workers if each.connection not in busy]:
            if not portions:
                return
            start, stop = portions.popleft()
            if worker.process.poll() is not None:  # it died while idle
                self._replace(worker)
                worker = self._workers[-1]
            with suppress(OSError):  # it dies now: `_advance` sees the closed connection
                worker.connection.send(tasks[start:stop])
            busy[worker.connection] = _Job(worker, start, stop, self._deadline())

    def _advance(
        self,
        job: _Job,
        answers: list[Answer | None],
        portions: deque[tuple[int, int]],
        busy: dict[Connection, _Job],
    ) -> None:
        """Take what the worker has answered; end it when it has died or its time is over."""
        connection = job.worker.connection
        lost: Answer | None = None
        try:
            while job.next < job.stop and connection.poll():
                answers[job.next] = connection.recv()
                job.next += 1
                job.deadline = self._deadline()
        except (EOFError, OSError):
            status = self._replace(job.worker)
            lost = Answer(0.0, {}, f"the reward worker died (exit status {status})")
        else:
            if job.next < job.stop and time.monotonic() > job.deadline:
                self._replace(job.worker)
                lost = Answer(
                    0.0,
                    {},
                    f"took longer than {self._timeout_s:g} s and could not be interrupted",
                    timed_out=True,
                )
        if lost:
            answers[job.next] = lost
            job.next += 1
            if job.next < job.stop:
                portions.appendleft((job.next, job.stop))
        if lost or job.next == job.stop:
            del busy[connection]

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s + GRACE_S

    def _report(self, by_function: list[list[Answer]]) -> RewardReport:
        failures = [each for answers in by_function for each in answers if each.error]
        num_timeouts = sum(each.timed_out for each in failures)
        report = RewardReport(
            results=[self._result(answers) for answers in zip(*by_function, strict=True)],
            num_errors=len(failures) - num_timeouts,
            num_timeouts=num_timeouts,
            first_error=failures[0].error if failures else None,
        )
        if failures:
            log.warning(
                "%d reward calls failed and %d took too long; they score 0. The first: %s",
                report.num_errors,
                num_timeouts,
                report.first_error,
            )
        return report

    def _result(self, answers: Sequence[Answer]) -> RewardResult:
        components: dict[str, float] = {}
        for name, each in zip(self._names, answers, strict=True):
            if len(answers) > 1:
                components[name] = each.score
            components |= {
                f"{name}/{part}" if len(answers) > 1 else part: value
                for part, value in each.components.items()
            }
        return RewardResult(
            score=sum(
                spec.weight * each.score for spec, each in zip(self._specs, answers, strict=True)
            ),
            components=components,
            error=next((each.error for each in answers if each.error), None),
        )


@dataclass
class _Job:
    """A worker at work on the tasks `next..stop`; `next` is the one it has not answered yet."""

    worker: _Worker
    next: int
    stop: int
    deadline: float  # of time.monotonic()


def _component_names(specs: Sequence[RewardSpec]) -> list[str]:
    names = [spec.name for spec in specs]
    return [
        name if names.count(name) == 1 else f"{name}_{index}"
        for index, name in enumerate(names, start=1)
    ]
