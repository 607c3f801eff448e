"""Alarm rules: which reading of a run's history each alarm checks, and what it reports."""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rlctl.tracking import run_summary
from rlctl.tracking.run_summary import Row, figure, lower_is_better, validation_metric

START_STEPS = 3  # the first steps, whose mean is the reference of relative readings
REWARD_STEPS = 3  # steps over which the reward around a validation is averaged
MIN_REWARD_S = 1.0  # of a step; a shorter time for the reward is no problem
FAILED_REWARDS = "failed_rewards"  # the first advice: others may follow from it
COMPONENT = "reward/"  # prefix of metrics
MEMORY = "perf/process_memory_gb/"
MIN_GROWTH_GB = 1.0  # of a process
_WARM_STEPS = 10  # in which the memory of a process may grow
_NOISE = 3.0  # times the mean change from step to step: a smaller change is none
MARGIN = 0.1  # hysteresis, as a share of the limit

Series = Sequence[tuple[int, float]]  # (step, finite value), oldest first


class History(defaultdict[str, list[tuple[int, float]]]):
    """Metrics that the rules read, by name: (step, finite value), oldest first.

    `validation` has negated losses, `zero_advantages` the number of such steps in a row, and
    `reward_time` shares of a step.
    """

    def __init__(self) -> None:
        super().__init__(list)
        self.words: dict[str, str] = {}  # for messages

    def add(self, row: Row) -> None:
        """Append the values of the next row, which has a `step`."""
        step = int(row["step"])
        for name, metrics in _METRICS.items():
            if (value := figure(row, metrics)) is not None:
                self[name].append((step, value))
        if (metric := validation_metric(row)) and (value := figure(row, (metric,))) is not None:
            if lower_is_better(metric):
                value = -value
            self["validation"].append((step, value))
        for name in row:
            part = None
            if name.startswith(MEMORY):
                part = "memory"
            elif name.startswith(COMPONENT) and name.endswith("/mean"):
                part = "components"
            if part is not None and math.isfinite(row[name]):
                self[name].append((step, row[name]))
                self[part].append((step, row[name]))
        skipped = [
            value
            for name, value in row.items()
            if name.endswith("/skipped_updates") and math.isfinite(value)
        ]
        if skipped:
            self["skipped"].append((step, sum(skipped)))
        waited = figure(row, ("timing_s/reward",))
        seconds = figure(row, run_summary.SECONDS)
        if waited is not None and seconds:
            share = 0.0
            if waited >= MIN_REWARD_S:
                share = waited / seconds
            self["reward_time"].append((step, share))
        for name, metric in (("zero_scores", "score"), ("zero_advantages", "advantages")):
            extremes = [figure(row, (f"critic/{metric}/{end}",)) for end in ("min", "max")]
            if None not in extremes:
                num_zero = 0.0
                if not any(extremes):
                    num_zero = (latest(self[name]) or 0.0) + 1
                self[name].append((step, num_zero))


_METRICS: Mapping[str, tuple[str, ...]] = {
    "entropy": ("actor/entropy",),
    "kl": ("actor/reward_kl_penalty", "actor/kl_loss"),
    "update_kl": ("actor/ppo_kl",),
    "length": run_summary.LENGTH,
    "truncated": ("response_length/clip_ratio",),
    "uniform": ("critic/score/uniform_groups",),
    "reward": run_summary.REWARD,
    FAILED_REWARDS: ("reward/num_failed",),
    "mismatch": ("training/rollout_probs_diff_mean",),
}


def latest(series: Series) -> float | None:
    """Return the newest value, or None for an empty series."""
    return series[-1][1] if series else None


def share_of_start(series: Series) -> float | None:
    """Return newest value / mean of the first `START_STEPS` values; None during these steps."""
    start = math.fsum(value for _, value in series[:START_STEPS]) / START_STEPS
    if len(series) <= START_STEPS or start <= 0:
        return None
    return series[-1][1] / start


def drift(series: Series) -> float | None:
    """Return the factor (≥ 1) by which the newest value is above or below the start."""
    share = share_of_start(series)
    if share is None:
        return None
    if share <= 0:
        return math.inf
    return max(share, 1 / share)


def fall_under_rising_reward(validation: Series, reward: Series) -> float | None:
    """Return the relative drop of validation from its best while the training reward has risen.

    The pattern indicates reward hacking or overfitting. 0 if the reward has not risen since the
    best validation; None before the second validation.
    """
    if len(validation) < 2:
        return None
    step, value = validation[-1]
    best_step, best = max(validation, key=lambda point: point[1])
    before = _mean_until(reward, best_step)
    now = _mean_until(reward, step)
    if before is None or now is None or now <= before:
        return 0.0
    return (best - value) / max(abs(best), 1e-8)


def _mean_until(series: Series, step: int) -> float | None:
    """Return the mean of the last `REWARD_STEPS` values up to `step`, or None without any."""
    last = [value for at, value in series if at <= step][-REWARD_STEPS:]
    if not last:
        return None
    return math.fsum(last) / len(last)


def collapse(series: Series) -> float | None:
    """Return the drop of the last `REWARD_STEPS` values from the best ones, as a share of these.

    The share of their range, if that is larger: rewards may be negative. 0 within the noise.
    """
    values = [value for _, value in series]
    if len(values) < 2 * REWARD_STEPS:
        return None
    ends = range(REWARD_STEPS, len(values) + 1)
    means = [math.fsum(values[end - REWARD_STEPS : end]) / REWARD_STEPS for end in ends]
    best = max(means)
    lowest = min(means[:-REWARD_STEPS])
    drop = best - means[-1]
    if drop <= _NOISE * _step_change(values[:-REWARD_STEPS]):
        return 0.0
    return drop / max(abs(best), best - lowest)


def opposed(history: History) -> float | None:
    """Return the smaller of the largest rise and the largest fall of the reward's components.

    Both are shares of the larger value, of the start and now. Their names are in `history.words`.
    """
    changes = {"": 0.0}
    for name, series in [*history.items()]:
        values = [value for _, value in series]
        if not name.startswith(COMPONENT) or len(values) < 2 * START_STEPS:
            continue
        before, now = (math.fsum(x) for x in (values[:START_STEPS], values[-START_STEPS:]))
        if abs(now - before) > _NOISE * START_STEPS * _step_change(values):
            short = name.removeprefix(COMPONENT).removesuffix("/mean")
            changes[short] = (now - before) / max(abs(before), abs(now))
    rising, falling = (best(changes, key=changes.__getitem__) for best in (max, min))
    history.words |= {"rising": rising, "falling": falling}
    return max(0.0, min(changes[rising], -changes[falling]))


def growth(history: History) -> float | None:
    """Return the largest growth of a process since its first steps; 0 below `MIN_GROWTH_GB`."""
    found = {"": 0.0}
    for name, series in [*history.items()]:
        if name.startswith(MEMORY) and len(series) > _WARM_STEPS:
            start = max(value for _, value in series[:_WARM_STEPS])
            if (grown := series[-1][1] - start) >= MIN_GROWTH_GB:
                found[name.removeprefix(MEMORY)] = grown / start
    history.words["process"] = max(found, key=found.__getitem__)
    return max(found.values())


def _step_change(values: Sequence[float]) -> float:
    """Return the mean absolute change from one step to the next."""
    return math.fsum(abs(b - a) for a, b in pairwise(values)) / (len(values) - 1)


_READINGS: Mapping[str, Callable[[History, str], float | None]] = {
    "latest": lambda history, series: latest(history[series]),
    "share_of_start": lambda history, series: share_of_start(history[series]),
    "drift": lambda history, series: drift(history[series]),
    "collapse": lambda history, series: collapse(history[series]),
    "fall_under_rising_reward": lambda history, series: fall_under_rising_reward(
        history[series], history["reward"]
    ),
    "opposed": lambda history, _: opposed(history),
    "growth": lambda history, _: growth(history),
}


@dataclass(frozen=True)
class Rule:
    """Condition of one alarm, as in `alarms.toml`.

    Its reading is None where the history does not suffice; a step without a new value in `series`
    is skipped. With `below` the alarm fires at low readings.
    """

    name: str
    series: str
    message: str
    over_message: str
    hint: str
    reading: str = "latest"
    below: bool = False
    patience: int = 3

    def read(self, history: History) -> float | None:
        """Return the reading, None where the history does not suffice."""
        return _READINGS[self.reading](history, self.series)

    def violated(self, value: float, limit: float) -> bool:
        """Return True if the reading has reached the limit."""
        if self.below:
            return value <= limit
        return value >= limit

    def recovered(self, value: float, limit: float) -> bool:
        """Return True if the reading is back within the limit by `MARGIN` of it."""
        if self.below:
            return value >= limit * (1 + MARGIN)
        return value <= limit * (1 - MARGIN)


_FILE = Path(__file__).with_name("alarms.toml")
RULES = tuple(
    Rule(name, **row) for name, row in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
)
