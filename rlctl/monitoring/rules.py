"""Alarm rules: which reading of a run's history each alarm checks, and what it reports."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlctl.monitoring import run_summary
from rlctl.monitoring.run_summary import Row, figure, lower_is_better, validation_metric

START_STEPS = 3  # the first steps, whose mean is the reference of relative readings
REWARD_STEPS = 3  # steps over which the reward around a validation is averaged
MIN_REWARD_S = 1.0  # of a step; a shorter time for the reward is no problem
FAILED_REWARDS = "failed_rewards"  # the first advice: others may follow from it
MARGIN = 0.1  # hysteresis, as a share of the limit

Series = Sequence[tuple[int, float]]  # (step, finite value), oldest first


class History(defaultdict[str, list[tuple[int, float]]]):
    """Metrics that the rules read, by name: (step, finite value), oldest first.

    `validation` has negated losses, `zero_advantages` the number of such steps in a row, and
    `reward_time` shares of a step.
    """

    def __init__(self) -> None:
        super().__init__(list)

    def add(self, row: Row) -> None:
        """Append the values of the next row, which has a `step`."""
        step = int(row["step"])
        for name, metrics in _METRICS.items():
            if (value := figure(row, metrics)) is not None:
                self[name].append((step, value))
        if (metric := validation_metric(row)) and (value := figure(row, (metric,))) is not None:
            self["validation"].append((step, -value if lower_is_better(metric) else value))
        skipped = [
            value
            for name, value in row.items()
            if name.endswith("/skipped_updates") and math.isfinite(value)
        ]
        if skipped:
            self["skipped"].append((step, sum(skipped)))
        waited, seconds = figure(row, ("timing_s/reward",)), figure(row, run_summary.SECONDS)
        if waited is not None and seconds:
            is_long = waited >= MIN_REWARD_S
            self["reward_time"].append((step, waited / seconds if is_long else 0.0))
        scores = [figure(row, (f"critic/score/{end}",)) for end in ("min", "max")]
        if None not in scores:
            before = latest(self["zero_scores"]) or 0.0
            self["zero_scores"].append((step, 0.0 if any(scores) else before + 1))
        extremes = [figure(row, (f"critic/advantages/{end}",)) for end in ("min", "max")]
        if None not in extremes:
            before = latest(self["zero_advantages"]) or 0.0
            self["zero_advantages"].append((step, 0.0 if any(extremes) else before + 1))


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
    return series[-1][1] / start if len(series) > START_STEPS and start > 0 else None


def drift(series: Series) -> float | None:
    """Return the factor (≥ 1) by which the newest value is above or below the start."""
    share = share_of_start(series)
    return None if share is None else max(share, 1 / share) if share > 0 else math.inf


def fall_under_rising_reward(validation: Series, reward: Series) -> float | None:
    """Return the relative drop of validation from its best while the training reward has risen.

    The pattern indicates reward hacking or overfitting. 0 if the reward has not risen since the
    best validation; None before the second validation.
    """
    if len(validation) < 2:
        return None
    (step, value), (best_step, best) = validation[-1], max(validation, key=lambda point: point[1])
    before, now = _mean_until(reward, best_step), _mean_until(reward, step)
    if before is None or now is None or now <= before:
        return 0.0
    return (best - value) / max(abs(best), 1e-8)


def _mean_until(series: Series, step: int) -> float | None:
    """Return the mean of the last `REWARD_STEPS` values up to `step`, or None without any."""
    last = [value for at, value in series if at <= step][-REWARD_STEPS:]
    return math.fsum(last) / len(last) if last else None


@dataclass(frozen=True)
class Rule:
    """Condition of one alarm.

    `reading` returns None where the history does not suffice; a step without a new value in
    `series` is skipped. `message` and `over_message` may use {value} and {limit}; `hint` suggests a
    remedy. With `below` the alarm fires at low readings.
    """

    name: str
    reading: Callable[[History], float | None]
    series: str
    message: str
    over_message: str
    hint: str
    below: bool = False
    patience: int = 3

    def violated(self, value: float, limit: float) -> bool:
        """Return True if the reading has reached the limit."""
        return value <= limit if self.below else value >= limit

    def recovered(self, value: float, limit: float) -> bool:
        """Return True if the reading is back within the limit by `MARGIN` of it."""
        return value >= limit * (1 + MARGIN) if self.below else value <= limit * (1 - MARGIN)


RULES = (
    Rule(
        FAILED_REWARDS,
        lambda history: latest(history["failed_rewards"]),
        "failed_rewards",
        "failed rewards: the reward of {value:.0f} responses of the step failed, so they score 0",
        "no more rewards fail",
        "`rlctl logs RUN` has the first tracebacks; reward.failed=drop leaves such responses out",
        patience=1,
    ),
    Rule(
        "zero_scores",
        lambda history: latest(history["zero_scores"]),
        "zero_scores",
        "no reward: every response scores 0 for {value:.0f} steps in a row",
        "there are scores other than 0 again",
        "do responses lack the form that the scorer expects (`rlctl show RUN --samples --train`)? "
        "are they cut off (response_length/clip_ratio)? does a right one score (`rlctl reward "
        "test`)? does the reward fail (`rlctl logs RUN`)? are the problems too hard? See "
        "docs/troubleshooting.md",
        patience=1,
    ),
    Rule(
        "entropy_collapse",
        lambda history: share_of_start(history["entropy"]),
        "entropy",
        "entropy collapse: the policy's entropy is {value:.1%} of its initial value",
        "entropy is back at {value:.1%} of its initial value",
        "try a lower learning rate, or a larger clip_ratio_high or entropy_coeff",
        below=True,
    ),
    Rule(
        "kl",
        lambda history: latest(history["kl"]),
        "kl",
        "KL runaway: the KL to the reference is {value:.3g} per token",
        "the KL to the reference is back at {value:.3g} per token",
        "try a larger KL coefficient or a lower learning rate",
    ),
    Rule(
        "update_kl",
        lambda history: latest(history["update_kl"]),
        "update_kl",
        "updates too large: one step changes the policy by a KL of {value:.3g}",
        "updates are smaller again: a KL of {value:.3g} per step",
        "try a lower learning rate, fewer ppo_epochs or larger mini-batches",
    ),
    Rule(
        "length_drift",
        lambda history: drift(history["length"]),
        "length",
        "length drift: the length of responses has changed by a factor of {value:.2g}",
        "the length of responses is back within a factor of {value:.2g} of its initial value",
        "check if the reward favours length: `rlctl show RUN --samples` prints responses",
    ),
    Rule(
        "truncation",
        lambda history: latest(history["truncated"]),
        "truncated",
        "truncation: {value:.0%} of the responses reach data.max_response_length",
        "truncation is back at {value:.0%} of the responses",
        "try a larger data.max_response_length, or algorithm.overlong_buffer",
    ),
    Rule(
        "uniform_groups",
        lambda history: latest(history["uniform"]),
        "uniform",
        "groups without variance: in {value:.0%} of the groups all responses score the same, "
        "so they give no gradient",
        "groups without variance are back at {value:.0%}",
        "try harder or easier prompts, a larger rollout.n, or algorithm.filter_groups",
    ),
    Rule(
        "validation_falls",
        lambda history: fall_under_rising_reward(history["validation"], history["reward"]),
        "validation",
        "the reward rises while validation falls: validation is {value:.0%} below its best",
        "validation no longer falls while the reward rises",
        "check for reward hacking or overfitting: compare the samples of both steps",
        patience=1,
    ),
    Rule(
        "rollout_mismatch",
        lambda history: latest(history["mismatch"]),
        "mismatch",
        "rollout mismatch: token probabilities of engine and trainer differ by {value:.3g}",
        "token probabilities of engine and trainer agree again, within {value:.3g}",
        "algorithm.rollout_correction reweights or masks the tokens that differ",
    ),
    Rule(
        "skipped_updates",
        lambda history: latest(history["skipped"]),
        "skipped",
        "{value:.0f} updates skipped in one step because of a non-finite loss or gradient",
        "no more updates are skipped",
        "try a lower learning rate; the batch is in the attempt's folder",
        patience=1,
    ),
    Rule(
        "zero_advantages",
        lambda history: latest(history["zero_advantages"]),
        "zero_advantages",
        "nothing to learn: all advantages are 0 for {value:.0f} steps in a row",
        "there are advantages other than 0 again",
        "check that responses to one prompt score differently: `rlctl show RUN --samples`",
        patience=1,
    ),
    Rule(
        "slow_reward",
        lambda history: latest(history["reward_time"]),
        "reward_time",
        "slow reward: {value:.0%} of the step's time is spent waiting for the reward",
        "the reward is back at {value:.0%} of the step's time",
        "try more reward.num_processes, or `async def` for a function that waits for a server",
    ),
)
