"""Pool that scores responses with one or more reward functions; no function can stop a run.

Entry points declared `in_process` are called directly. All other functions run in worker processes
that start once per run: synchronous ones in several, asynchronous ones on the event loop of one, so
that the limits of their requests are those of the run. A call that raises, returns no number, hangs
or kills its process scores 0 and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import InternalError
from rlctl.recipes import schema
from rlctl.runtime.rewards import functions as reward_functions
from rlctl.runtime.rewards.functions import (
    Call,
    CallResult,
    LoadedReward,
    RewardSpec,
    call_reward,
    is_user_code,
)
from rlctl.runtime.rewards.loading import ask_plugin, find_reward, load_reward
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.rewards.reward_report import RewardReport, build_report
from rlctl.runtime.rewards.specs import check_sources, reward_specs
from rlctl.runtime.sandbox.worker_settings import Limits, WorkerSettings

if TYPE_CHECKING:
    from rlctl.runtime.rewards.reward_workers import RewardWorkers

SCORERS_LOG = "reward-scorers-0.log"  # of failed calls in this process


class RewardPool:
    """Pool of reward functions, built once per run; `close()` it or use it as a context manager.

    No worker process outlives the program, also if the program is killed.
    """

    def __init__(
        self,
        functions: Sequence[RewardSpec],
        *,
        timeout_s: float,
        workers: WorkerSettings | None = None,
        requests: RequestSettings | None = None,
    ) -> None:
        """Load `functions` and start the workers, if any function needs them.

        `timeout_s` is the time limit of a call, and of the first import of a user's code, in
        seconds. Logs are `reward-<number>.log`. Workers also get the environment variables that a
        function asks for. `requests` limits the requests of asynchronous functions. Raises
        ConfigError if a function cannot be loaded or called, ResourceError if a worker does not
        start.
        """
        settings = workers or WorkerSettings()
        self.functions = list(functions)
        self.direct: dict[int, LoadedReward] = {
            index: load_reward(spec)
            for index, spec in enumerate(self.functions)
            if not is_user_code(spec.function)
            and getattr(find_reward(spec.function), "in_process", False)
        }
        if self.direct and settings.logs is not None:
            reward_functions.log_failures = str(settings.logs / SCORERS_LOG)
        self.traits = {index: reward.traits for index, reward in self.direct.items()}
        self._pooled = [i for i in range(len(self.functions)) if i not in self.direct]
        specs = [self.functions[index] for index in self._pooled]
        needed = [name for spec in specs for name in ask_plugin(spec, "environment") or ()]
        settings = replace(settings, env=[*settings.env, *needed])
        self._env = settings.env
        self.workers: RewardWorkers | None = None
        if self._pooled:
            from rlctl.runtime.rewards.reward_workers import RewardWorkers

            self.workers = RewardWorkers(specs, timeout_s, settings, requests or RequestSettings())
            try:
                self.workers.start()
            except BaseException:
                self.close()
                raise
            self.traits |= dict(zip(self._pooled, self.workers.traits, strict=True))

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
        number = reward.num_processes or num_processes
        return cls(
            reward_specs(reward, sources),
            timeout_s=reward.timeout_s,
            workers=WorkerSettings(
                number, logs, reward.env, Limits.from_config(reward.limits, number)
            ),
            requests=requests,
        )

    @property
    def has_workers(self) -> bool:
        """True if any function runs in a worker process."""
        return bool(self._pooled)

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
        if self.workers is not None:
            self.workers.drop_waiting()
        return Scoring(self, groups)

    def submit(self, index: int, calls: Sequence[Call]) -> Future[list[CallResult]]:
        """Call the function `index` in a worker and return the future of its results."""
        assert self.workers is not None, "a pool without workers calls its functions itself"
        return self.workers.submit(self._pooled.index(index), calls)

    def explained(self, result: CallResult) -> CallResult:
        """Return a result whose error names the setting for a variable that is not passed on."""
        if not result.error:
            return result
        from rlctl.runtime.sandbox.process_limits import withheld_variable

        name = withheld_variable(result.error, self._env)
        if name is None:
            return result
        hint = f"{name} is set, but reward code gets it only with reward.env=[{name}]"
        return result._replace(error=f"{result.error}; {hint}")

    def close(self) -> None:
        """Kill the workers. Further calls are refused."""
        if self.workers is not None:
            self.workers.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


OnResult = Callable[[int, int], object]  # number of results, and of calls


class Scoring:
    """Scores of B rows; `groups` has the number of each row's group.

    Each row is passed to `add`, or to `skip` if nothing is to be scored. The report depends on the
    rows alone, not on the order in which they come.
    """

    def __init__(self, pool: RewardPool, groups: Sequence[int]) -> None:
        self._pool = pool
        self._groups = groups
        self._members: dict[int, list[int]] = {}  # rows of a group that have been added
        self._missing: dict[int, int] = {}  # number of rows of a group that have not
        for group in groups:
            self._missing[group] = self._missing.get(group, 0) + 1
        self._calls: dict[int, Call] = {}
        self._results: list[list[CallResult | None]] = [
            [None] * len(groups) for _ in pool.functions
        ]
        # Function and rows of each call of a worker.
        self._open: dict[Future[list[CallResult]], tuple[int, list[int]]] = {}

    def add(self, row: int, prompt: PromptRow, response: str) -> None:
        """Begin to score the response `response` of a row.

        Raises ConfigError if no function scores the row's data source.
        """
        check_sources(self._pool.functions, [prompt.data_source])
        self._calls[row] = Call(
            prompt.data_source,
            response,
            prompt.ground_truth,
            prompt.extra_info,
            prompt.prompt,
            prompt.images,
        )
        self._members.setdefault(self._groups[row], []).append(row)
        self._run([row], scores_groups=False)
        self.skip(row)

    def skip(self, row: int) -> None:
        """Leave a row without a score, if it was not added; its group has one response less."""
        group = self._groups[row]
        self._missing[group] -= 1
        if self._missing[group] == 0 and group in self._members:
            self._run(sorted(self._members[group]), scores_groups=True)

    def finish(self, on_result: OnResult | None = None) -> RewardReport:
        """Wait for all results and return the report."""
        if any(self._missing.values()):
            raise InternalError("rows were neither added to the scoring nor skipped")
        for number, future in enumerate(as_completed(self._open), start=1):
            self._record(*self._open[future], future.result())
            if on_result is not None:
                on_result(number, len(self._open))
        return build_report(self._pool.functions, self._results, len(self._groups))

    def _run(self, rows: list[int], *, scores_groups: bool) -> None:
        """Run the functions that score groups, or the others, on rows of one group."""
        source = self._calls[rows[0]].data_source
        calls = [self._calls[row] for row in rows]
        for index, spec in enumerate(self._pool.functions):
            traits = self._pool.traits[index]
            if traits.scores_groups is not scores_groups or not spec.scores(source):
                continue
            direct = self._pool.direct.get(index)
            if direct is not None:
                self._record(index, rows, call_reward(direct, calls))
                continue
            needed = calls
            if "images" not in traits.takes:  # files, which a worker would get for each response
                needed = [call._replace(images=()) for call in calls]
            self._open[self._pool.submit(index, needed)] = (index, rows)

    def _record(self, index: int, rows: list[int], results: Sequence[CallResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self._results[index][row] = self._pool.explained(result)
