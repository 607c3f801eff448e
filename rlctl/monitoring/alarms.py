"""Alarms: what goes wrong in reinforcement learning without an error, seen in the metrics while it begins.

Each rule reads one number off the history of a run. It rings after `patience` readings in a row beyond its limit, so that one odd step is
no alarm, and is over after as many in a row that are back by a tenth of the limit, so that a number on the edge does not ring at each
step. All of it is a function of the rows of `metrics.jsonl`: a resumed run, which reads them again, goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol, runtime_checkable

from rlctl.monitoring import run_summary as headline
from rlctl.monitoring.run_summary import Row, figure, lower_is_better, validation_metric

EVENT, OVER = "alarm", "alarm_over"  # their kinds in events.jsonl
START_STEPS = 3  # what a run is compared with is the mean of its first steps
REWARD_STEPS = 3  # rewards around a validation are compared as means of so many steps
MARGIN = 0.1  # of the limit: so far back is back

Series = Sequence[tuple[int, float]]  # (step, finite value), oldest first


@dataclass(frozen=True)
class Limits:
    """Where alarms begin, by the name of the alarm; None switches one off. `trainer.alarms` says what each number means;
    `rollout_mismatch` is `trainer.mismatch.warn`.
    """

    entropy_collapse: float | None = None
    kl: float | None = None
    update_kl: float | None = None
    length_drift: float | None = None
    truncation: float | None = None
    uniform_groups: float | None = None
    validation_falls: float | None = None
    rollout_mismatch: float | None = None
    skipped_updates: float | None = None


@dataclass(frozen=True)
class Alarm:
    """An alarm that begins (`over` False) or ends at `step`. `value` is the reading that `limit` is for; `message` is for people."""

    name: str
    step: int
    value: float
    limit: float
    message: str
    hint: str
    over: bool

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}" + ("" if self.over else f" ({self.hint})")


@runtime_checkable
class ShowsAlarms(Protocol):
    """A tracker that shows alarms when they begin and end."""

    def alarm(self, alarm: Alarm) -> None: ...


@dataclass
class History:
    """The columns that rules read, finite values only."""

    entropy: list[tuple[int, float]] = field(default_factory=list)
    kl: list[tuple[int, float]] = field(default_factory=list)
    update_kl: list[tuple[int, float]] = field(default_factory=list)
    length: list[tuple[int, float]] = field(default_factory=list)
    truncated: list[tuple[int, float]] = field(default_factory=list)
    uniform: list[tuple[int, float]] = field(default_factory=list)
    reward: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(
        default_factory=list
    )  # larger is better: a loss is negated
    mismatch: list[tuple[int, float]] = field(default_factory=list)
    skipped: list[tuple[int, float]] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """The next row, with its `step`."""
        step = int(row["step"])
        for name, names in _COLUMNS.items():
            if (value := figure(row, names)) is not None:
                getattr(self, name).append((step, value))
        if (metric := validation_metric(row)) and (value := figure(row, (metric,))) is not None:
            self.validation.append((step, -value if lower_is_better(metric) else value))
        skipped = [
            value
            for name, value in row.items()
            if name.endswith("/skipped_updates") and math.isfinite(value)
        ]
        if skipped:
            self.skipped.append((step, sum(skipped)))


_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "entropy": ("actor/entropy",),
    "kl": ("actor/reward_kl_penalty", "actor/kl_loss"),
    "update_kl": ("actor/ppo_kl",),
    "length": headline.LENGTH,
    "truncated": ("response_length/clip_ratio",),
    "uniform": ("critic/score/uniform_groups",),
    "reward": headline.REWARD,
    "mismatch": ("training/rollout_probs_diff_mean",),
}


def latest(series: Series) -> float | None:
    """The newest value."""
    return series[-1][1] if series else None


def share_of_start(series: Series) -> float | None:
    """The newest value as a share of the mean of the first steps; None while there is no start to compare with."""
    start = math.fsum(value for _, value in series[:START_STEPS]) / START_STEPS
    return series[-1][1] / start if len(series) > START_STEPS and start > 0 else None


def drift(series: Series) -> float | None:
    """How many times as large, or as small, as at the start: always at least 1."""
    share = share_of_start(series)
    return None if share is None else max(share, 1 / share) if share > 0 else math.inf


def fall_under_rising_reward(validation: Series, reward: Series) -> float | None:
    """By which share of its best the newest validation lies below it, if the training reward has risen since that best; else 0.

    That is a reward which is being gamed, or prompts that are learned by heart. None before the second validation.
    """
    if len(validation) < 2:
        return None
    (step, value), (best_step, best) = validation[-1], max(validation, key=lambda point: point[1])
    before, now = _mean_until(reward, best_step), _mean_until(reward, step)
    if before is None or now is None or now <= before:
        return 0.0
    return (best - value) / max(abs(best), 1e-8)


def _mean_until(series: Series, step: int) -> float | None:
    last = [value for at, value in series if at <= step][-REWARD_STEPS:]
    return math.fsum(last) / len(last) if last else None


@dataclass(frozen=True)
class Rule:
    """`reading` is None where the history says nothing. In a step without a new value in
    `column` of it there is no reading.

    `text` and `over` are what people are told, with {value} and {limit}; `hint` what they might do.
    """

    name: str
    reading: Callable[[History], float | None]
    column: str
    text: str
    over: str
    hint: str
    below: bool = False
    patience: int = 3

    def beyond(self, value: float, limit: float) -> bool:
        return value <= limit if self.below else value >= limit

    def back(self, value: float, limit: float) -> bool:
        return value >= limit * (1 + MARGIN) if self.below else value <= limit * (1 - MARGIN)


RULES = (
    Rule(
        "entropy_collapse",
        lambda history: share_of_start(history.entropy),
        "entropy",
        "entropy collapse: the policy's entropy is {value:.1%} of its start",
        "entropy is back at {value:.1%} of its start",
        "a lower learning rate, a larger clip_ratio_high or entropy_coeff",
        below=True,
    ),
    Rule(
        "kl",
        lambda history: latest(history.kl),
        "kl",
        "KL runaway: {value:.3g} a token to the reference",
        "the KL to the reference is back at {value:.3g} a token",
        "a larger KL coefficient or a lower learning rate",
    ),
    Rule(
        "update_kl",
        lambda history: latest(history.update_kl),
        "update_kl",
        "updates too large: the policy moves by a KL of {value:.3g} in one step",
        "updates are smaller again: a KL of {value:.3g} in one step",
        "a lower learning rate, fewer ppo_epochs or larger mini-batches",
    ),
    Rule(
        "length_drift",
        lambda history: drift(history.length),
        "length",
        "length drift: answers have changed their length {value:.2g}-fold",
        "the length of answers is back within {value:.2g} times of its start",
        "does the reward pay for length? `rlctl show RUN --samples` shows answers",
    ),
    Rule(
        "truncation",
        lambda history: latest(history.truncated),
        "truncated",
        "truncation: {value:.0%} of the answers reach data.max_response_length",
        "truncation is back at {value:.0%} of the answers",
        "a larger data.max_response_length, or algorithm.overlong_buffer",
    ),
    Rule(
        "uniform_groups",
        lambda history: latest(history.uniform),
        "uniform",
        "groups without variance: in {value:.0%} of them all answers score alike, and teach nothing",
        "groups without variance are back at {value:.0%}",
        "harder or easier prompts, a larger rollout.n, or algorithm.filter_groups",
    ),
    Rule(
        "validation_falls",
        lambda history: fall_under_rising_reward(history.validation, history.reward),
        "validation",
        "the reward rises while validation falls: {value:.0%} below its best",
        "validation no longer falls under a rising reward",
        "reward hacking or overfitting: compare the samples of both steps",
        patience=1,
    ),
    Rule(
        "rollout_mismatch",
        lambda history: latest(history.mismatch),
        "mismatch",
        "rollout mismatch: engine and trainer differ by {value:.3g} in the probability of a token",
        "engine and trainer agree again, within {value:.3g}",
        "algorithm.rollout_correction weighs or leaves out what differs",
    ),
    Rule(
        "skipped_updates",
        lambda history: latest(history.skipped),
        "skipped",
        "{value:.0f} updates skipped in one step for a loss or gradient that is not finite",
        "no more updates are skipped",
        "a lower learning rate; the batch is in the folder of the attempt",
        patience=1,
    ),
)


@dataclass
class AlarmState:
    """Of one rule: whether it rings, and how many readings in a row speak against that."""

    rings: bool = False
    against: int = 0


@dataclass
class Alarms:
    """All alarms of one run. `earlier` are the rows of its attempts so far, as `read_metrics` gives them."""

    limits: Limits
    earlier: InitVar[Iterable[Row]] = ()
    history: History = field(default_factory=History)
    bells: dict[str, AlarmState] = field(
        default_factory=lambda: {rule.name: AlarmState() for rule in RULES}
    )

    def __post_init__(self, earlier: Iterable[Row]) -> None:
        for row in earlier:
            self.see(row)

    def see(self, row: Row) -> list[Alarm]:
        """The next row: alarms that begin or end with it."""
        self.history.add(row)
        changes = [self._judge(rule, int(row["step"])) for rule in RULES]
        return [change for change in changes if change is not None]

    def _judge(self, rule: Rule, step: int) -> Alarm | None:
        limit: float | None = getattr(self.limits, rule.name)
        series: Series = getattr(self.history, rule.column)
        value = rule.reading(self.history)
        if limit is None or value is None or series[-1][0] != step:
            return None
        bell = self.bells[rule.name]
        against = rule.back(value, limit) if bell.rings else rule.beyond(value, limit)
        bell.against = bell.against + 1 if against else 0
        if bell.against < rule.patience:
            return None
        bell.rings, bell.against = not bell.rings, 0
        text = rule.text if bell.rings else rule.over
        return Alarm(
            rule.name,
            step,
            value,
            limit,
            text.format(value=value, limit=limit),
            rule.hint,
            over=not bell.rings,
        )
