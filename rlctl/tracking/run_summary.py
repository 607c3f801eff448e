"""Key figures of a run, found in its metrics by name; shared by console, listings and reports."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, float]

# A figure is the first of these metrics that a row has: algorithms report different ones
# (SFT has a loss and no reward).
REWARD = ("critic/score/mean",)
KL = ("actor/reward_kl_penalty", "actor/kl_loss")  # to the reference
UPDATE_KL = ("actor/ppo_kl",)  # of the updates of one step
LOSS = ("train/loss",)
THROUGHPUT = ("perf/throughput",)
SECONDS = ("timing_s/step", "perf/time_per_step")
OUTSIDE_A_STEP = (("timing_s/testing",), ("timing_s/save_checkpoint",))  # not in SECONDS
TOKENS = ("perf/total_num_tokens",)
LENGTH = ("response_length/mean",)

_ACCURACY = re.compile(r"val-core/.+/acc/mean@\d+")
_VALIDATION = re.compile(r"val-core/.+/mean@\d+|val/loss")


def figure(row: Row, names: Sequence[str]) -> float | None:
    """Return the value of the first of `names` in the row, or None if absent or not finite."""
    value = next((row[name] for name in names if name in row), None)
    if value is None or not math.isfinite(value):
        return None
    return value


def validation_metric(row: Row) -> str | None:
    """Return the main validation metric of the row: the first accuracy, else the first other."""
    names = [name for name in row if name.startswith("val") and _VALIDATION.fullmatch(name)]
    return next(filter(_ACCURACY.fullmatch, names), next(iter(names), None))


def primary_metric(rows: Iterable[Row], chosen: str | None = None) -> str | None:
    """Return `chosen`, else the main metric of the first validation, else None."""
    return chosen or next((name for row in rows if (name := validation_metric(row))), None)


def is_accuracy(metric: str | None) -> bool:
    """Return True for a metric that is a share of correct responses."""
    return metric is not None and _ACCURACY.fullmatch(metric) is not None


def percent_or_number(metric: str | None, value: float | None) -> str:
    """Format an accuracy as a percentage, other metrics with three digits, None as a dash."""
    if value is None:
        return "-"
    if is_accuracy(metric):
        return f"{100 * value:.1f} %"
    return f"{value:.3g}"


def lower_is_better(metric: str) -> bool:
    """Return True for a metric whose best value is its smallest."""
    return metric.endswith("loss")


def is_better(metric: str, value: float, than: float) -> bool:
    """Return True if a value of the metric is better than another one."""
    if lower_is_better(metric):
        return value < than
    return value > than


@dataclass(frozen=True)
class RunSummary:
    """Key figures of a run.

    `first`, `last` and `best` (at `best_step`) are values of the validation `metric`; `seconds` and
    `tokens` are sums over all steps.
    """

    step: int | None = None
    metric: str | None = None
    first: float | None = None
    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    tokens: int = 0

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> RunSummary:
        """Build the summary from rows as `read_metrics` returns them, oldest first."""
        return cls().extended(rows)

    def extended(self, rows: Iterable[Row]) -> RunSummary:
        """Return the summary of the earlier rows and of `rows`; the first best value counts."""
        step = self.step
        metric = self.metric
        first = self.first
        last = self.last
        best = self.best
        best_step = self.best_step
        seconds = self.seconds
        tokens = float(self.tokens)
        for row in rows:
            step = int(row["step"])
            metric = metric or validation_metric(row)
            seconds += figure(row, SECONDS) or 0.0
            tokens += figure(row, TOKENS) or 0.0
            if metric is None or (value := figure(row, (metric,))) is None:
                continue
            if first is None:
                first = value
            last = value
            if best is None or is_better(metric, value, best):
                best = value
                best_step = step
        seconds = min(seconds, float(sys.maxsize))
        num_tokens = int(min(tokens, sys.maxsize))
        return RunSummary(step, metric, first, last, best, best_step, seconds, num_tokens)
