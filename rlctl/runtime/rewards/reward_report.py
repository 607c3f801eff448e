"""Results of the reward functions for a batch: weighted scores, components and failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.redaction import redact
from rlctl.runtime.rewards.functions import CallResult, RewardSpec


@dataclass(frozen=True)
class RewardReport:
    """One result per row, and the number of failed calls, which score 0.

    A result has the weighted sum of the functions' scores for a response, with its components.
    `num_errors` calls raised, lost their process or returned no number; `num_timeouts` calls
    exceeded the time limit.
    """

    results: list[CallResult]
    num_errors: int
    num_timeouts: int
    first_error: str | None  # without secrets
    first_timed_out: bool = False  # the call of `first_error`

    @property
    def scores(self) -> list[float]:
        """The score of each row."""
        return [result.score for result in self.results]

    def components(self) -> dict[str, list[float]]:
        """Return name -> one value per row; NaN if the row's call did not return the component."""
        names = dict.fromkeys(name for result in self.results for name in result.components)
        return {
            name: [result.components.get(name, math.nan) for result in self.results]
            for name in names
        }


def build_report(
    specs: Sequence[RewardSpec],
    by_function: Sequence[Sequence[CallResult | None]],
    num_rows: int,
) -> RewardReport:
    """Combine the results of each function, one for each of `num_rows` rows, into a report."""
    failures = [result for results in by_function for result in results if result and result.error]
    num_timeouts = sum(result.timed_out for result in failures)
    names = component_names(specs)
    return RewardReport(
        results=[
            _combine(specs, names, [results[row] for results in by_function])
            for row in range(num_rows)  # there may be no function: environments score then
        ],
        num_errors=len(failures) - num_timeouts,
        num_timeouts=num_timeouts,
        first_error=redact(failures[0].error or "") if failures else None,
        first_timed_out=bool(failures) and failures[0].timed_out,
    )


def exceeds(num_failed: int, num_rows: int, share: float) -> bool:
    """Return whether more than a share of the rows failed, rounded up to a number of rows.

    Rounded up, one failure in the last, small batch of a validation does not exceed it.
    """
    return num_failed > math.ceil(round(share * num_rows, 6))


def component_names(specs: Sequence[RewardSpec]) -> list[str]:
    """Return the name of each function; functions of the same name are numbered by position."""
    names = [spec.name for spec in specs]
    return [
        name if names.count(name) == 1 else f"{name}_{index}"
        for index, name in enumerate(names, start=1)
    ]


def _combine(
    specs: Sequence[RewardSpec], names: Sequence[str], results: Sequence[CallResult | None]
) -> CallResult:
    """Return the result of one row; `results` has one entry per function, None if not called.

    `error` and `pred` come from the first function that has one.
    """
    called = [row for row in zip(specs, names, results, strict=True) if row[2] is not None]
    components: dict[str, float] = {}
    score = 0.0
    is_one_of_several = len(called) > 1
    for spec, name, result in called:
        assert result is not None
        score += spec.weight * result.score
        if is_one_of_several:
            components[name] = result.score
        components |= {
            f"{name}/{part}" if is_one_of_several else part: value
            for part, value in result.components.items()
        }
    return CallResult(
        score=score,
        components=components,
        error=next((result.error for result in results if result and result.error), None),
        pred=next((result.pred for result in results if result and result.pred is not None), None),
    )
