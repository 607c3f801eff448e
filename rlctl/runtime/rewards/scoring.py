"""Scoring of one batch of responses, which may come one by one while others are generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
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
        # Function and rows of each call of a worker.
        self._open: dict[Future[list[CallResult]], tuple[int, list[int]]] = {}

    def add(self, row: int, prompt: PromptRow, response: str) -> None:
        """Begin to score the response `response` of a row.

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
            self._open[self._pool.submit(index, calls)] = (index, rows)

    def _record(self, index: int, rows: list[int], results: Sequence[CallResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self._results[index][row] = self._pool.explained(result)
