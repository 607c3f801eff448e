"""The few figures that a person wants of a run, found in its metrics by their names: for the console, `rlctl runs` and `rlctl show`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, float]

# The first of the names that a row has is what the figure shows. Algorithms differ in what they report: SFT has a loss and no reward.
REWARD = ("critic/score/mean",)
KL = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")
LOSS = ("train/loss",)
THROUGHPUT = ("perf/throughput",)
SECONDS = ("timing_s/step", "perf/time_per_step")
TOKENS = ("perf/total_num_tokens",)
LENGTH = ("response_length/mean",)

_ACCURACY = re.compile(r"val-core/.+/acc/mean@\d+")
_VALIDATION = re.compile(r"val-core/.+/mean@\d+|val/loss")


def figure(row: Row, names: Sequence[str]) -> float | None:
    """The value of the first of `names` that the row has, if it is finite."""
    value = next((row[name] for name in names if name in row), None)
    return value if value is not None and math.isfinite(value) else None


def validation_metric(row: Row) -> str | None:
    """The name of what validation is judged by in this row: an accuracy before a reward or a loss; of several data sets, the first."""
    names = [name for name in row if _VALIDATION.fullmatch(name)]
    return next((name for name in names if _ACCURACY.fullmatch(name)), names[0] if names else None)


def judged_by(rows: Iterable[Row], chosen: str | None = None) -> str | None:
    """The name of what a run is judged by: the one `chosen`, or what its first validation is judged by. None while there is neither."""
    return chosen or next((name for row in rows if (name := validation_metric(row))), None)


def is_accuracy(metric: str | None) -> bool:
    """Whether the metric is a share of right answers."""
    return metric is not None and _ACCURACY.fullmatch(metric) is not None


def lower_is_better(metric: str) -> bool:
    """Whether the best value of a validation metric is its smallest."""
    return metric.endswith("loss")


@dataclass(frozen=True)
class RunSummary:
    """A run in figures: `first`, `last` and `best` (at `best_step`) of the validation `metric`, sums of `seconds` and `tokens`."""

    step: int | None
    metric: str | None
    first: float | None
    last: float | None
    best: float | None
    best_step: int | None
    seconds: float
    tokens: int

    @classmethod
    def of(cls, rows: Iterable[Row]) -> RunSummary:
        """Of rows as `read_metrics` gives them, oldest first."""
        rows = list(rows)
        metric = judged_by(rows)
        points = [
            (value, int(row["step"]))
            for row in rows
            if metric and (value := figure(row, (metric,))) is not None
        ]
        best = _best(points, lower_is_better(metric)) if metric and points else (None, None)
        return cls(
            step=int(rows[-1]["step"]) if rows else None,
            metric=metric,
            first=points[0][0] if points else None,
            last=points[-1][0] if points else None,
            best=best[0],
            best_step=best[1],
            seconds=sum(figure(row, SECONDS) or 0.0 for row in rows),
            tokens=int(sum(figure(row, TOKENS) or 0 for row in rows)),
        )


def _best(points: Sequence[tuple[float, int]], lowest: bool) -> tuple[float, int]:
    """The best value and the first step that reached it."""
    return min(points, key=lambda point: (point[0] if lowest else -point[0], point[1]))
