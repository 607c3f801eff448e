"""Scoring of one batch of responses, which may come one by one while others are generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import InternalError
from rlctl.runtime.rewards.functions import Call, CallResult, call_reward
from rlctl.runtime.rewards.report import RewardReport, build_report
from rlctl.runtime.rewards.specs import check_sources

if TYPE_CHECKING:
    from rlctl.runtime.rewards.pool import RewardPool

OnResult = Callable[[int, int], object]  # number of results, and of calls


class Scoring:
    """Scores of B rows; `groups` has the number of each row's group.

    Each row is passed to `add`, or to `skip` if nothing is to be scored. The report depends on the
    rows alone, not on the order in which they come.
    """

    def __init__(self, pool: RewardPool, groups: Sequence[int]) -> None:
        self._pool, self._groups = pool, groups
        self._members: dict[int, list[int]] = {}  # rows of a group that have been added
        self._missing: dict[int, int] = {}  # number of rows of a group that have not
        for group in groups:
            self._missing[group] = self._missing.get(group, 0) + 1
        self._calls: dict[int, Call] = {}
        self._results: list[list[CallResult | None]] = [
            [None] * len(groups) for _ in pool.functions
        ]
        self._open: dict[int, tuple[int, list[int]]] = {}  # function and rows of each task
        self._num_tasks = 0

    def add(self, row: int, prompt: PromptRow, response: str) -> None:
        """Score the response `response` of a row; see `advance`.

        Raises ConfigError if no function scores the row's data source.
        """
        check_sources(self._pool.functions, [prompt.data_source])
        self._calls[row] = Call(
            prompt.data_source, response, prompt.ground_truth, prompt.extra_info, prompt.prompt
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

    def advance(self, wait_s: float = 0.0) -> None:
        """Send waiting calls to the workers and collect results, waiting for at most `wait_s`."""
        lanes = self._pool.lanes
        for lane in lanes:
            for number, results in lane.advance():
                if number in self._open:  # else it belongs to a batch that was given up
                    self._record(*self._open.pop(number), results)
        if wait_s > 0 and self._open:
            first = min(lane.deadline for lane in lanes) - time.monotonic()
            connections = [each for lane in lanes for each in lane.connections]
            wait(connections, max(0.0, min(first, wait_s)))

    def finish(self, on_result: OnResult | None = None) -> RewardReport:
        """Wait for all results and return the report."""
        if any(self._missing.values()):
            raise InternalError("rows were neither added to the scoring nor skipped")
        while self._open:
            self.advance(wait_s=60.0)
            if on_result is not None:
                on_result(self._num_tasks - len(self._open), self._num_tasks)
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
            number = self._pool.submit(index, calls)
            self._open[number] = (index, rows)
            self._num_tasks += 1

    def _record(self, index: int, rows: list[int], results: Sequence[CallResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self._results[index][row] = self._pool.explained(result)
