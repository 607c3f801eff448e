"""Progress of a run: the figures of its steps, and one plain line per step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rlctl.text import count, duration
from rlctl.tracking import run_summary
from rlctl.tracking.alarms import Alarm
from rlctl.tracking.run_summary import Row, figure, is_better, lower_is_better, percent_or_number

# Phases of a step by the name of their timing (`timing_s/gen`): label and colour.
PHASES = {
    "wait_rollouts": ("waiting for rollouts", "bright_blue"),
    "gen": ("rollout", "blue"),
    "reward": ("reward", "yellow"),
    "rm_scores": ("reward model", "bright_red"),
    "old_log_prob": ("log-probs", "cyan"),
    "ref": ("reference log-probs", "magenta"),
    "values": ("values", "bright_magenta"),
    "adv": ("advantages", "white"),
    "update_critic": ("critic update", "red"),
    "update_actor": ("actor update", "green"),
    "update_rm": ("reward model update", "bright_cyan"),
    "update_weights": ("weights to the engine", "bright_green"),
    "testing": ("validation", "bright_black"),
    "save_checkpoint": ("saving a checkpoint", "bright_yellow"),
}
ETA_WINDOW = 20  # steps: enough to smooth, few enough to follow a growing response length


@dataclass
class _Series:
    """One figure over the steps: the first of `metrics` that a row has, and how to format it."""

    name: str
    metrics: tuple[str, ...]
    format: Callable[[float], str]
    in_line: bool = True  # shown in the plain line, too
    values: list[float] = field(default_factory=list)


def _empty_series() -> list[_Series]:
    return [
        _Series("reward", run_summary.REWARD, "{:.3f}".format),
        _Series("loss", run_summary.LOSS, "{:.4f}".format),
        _Series("kl", run_summary.KL, "{:.2g}".format),
        _Series("update_kl", run_summary.UPDATE_KL, "{:.2g}".format, in_line=False),
        _Series("entropy", ("actor/entropy",), "{:.3g}".format, in_line=False),
        _Series("length", run_summary.LENGTH, "{:.0f}".format),
        _Series("turns", ("agent/turns/mean",), "{:.1f}".format),
        _Series("tok/s", run_summary.THROUGHPUT, count),
    ]


@dataclass
class Panel:
    """Figures of a run's display. `began` is a time of `time.monotonic`."""

    name: str = ""
    total_steps: int = 0
    began: float = field(default_factory=time.monotonic)
    step: int | None = None
    latest: dict[str, float] = field(default_factory=dict)
    series: list[_Series] = field(default_factory=_empty_series)
    validation: _Series | None = None
    best: tuple[float, int] | None = None  # best validation value and its step
    stamps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=ETA_WINDOW + 1))
    alarms: dict[str, tuple[int, str]] = field(default_factory=dict)  # active: step and message

    def add(self, step: int, row: Row, at: float) -> None:
        """Add the metrics of a step that ended at `at`, in seconds of any monotonic clock."""
        self.step = step
        self.latest = dict(row)
        self.stamps.append((step, at))
        for series in self.series:
            if (value := figure(row, series.metrics)) is not None:
                series.values.append(value)
        self.add_validation(step, row)

    def add_validation(self, step: int, row: Row) -> None:
        """Add the validation of a step, if it has one, such as that of an earlier attempt."""
        if (metric := run_summary.validation_metric(row)) and self.validation is None:
            # The metric is val/loss or val-core/SOURCE/NAME/mean@N.
            name = f"val {metric.split('/')[-2]}"
            if lower_is_better(metric):
                name = "val loss"
            self.validation = _Series(
                name, (metric,), lambda value: percent_or_number(metric, value)
            )
        if self.validation and (value := figure(row, self.validation.metrics)) is not None:
            self.validation.values.append(value)
            metric = self.validation.metrics[0]
            if self.best is None or is_better(metric, value, self.best[0]):
                self.best = value, step

    def alarm(self, alarm: Alarm) -> None:
        """Show an alarm that starts, or hide one that ends."""
        if alarm.over:
            self.alarms.pop(alarm.name, None)
        else:
            self.alarms[alarm.name] = alarm.step, alarm.message

    def clear(self) -> None:
        """Remove all steps, before the rows of a run that was rewound are added again."""
        self.step = None
        self.latest = {}
        self.series = _empty_series()
        self.validation = None
        self.best = None
        self.stamps.clear()

    def forget_alarms_after(self, step: int) -> None:
        """Remove alarms that started after `step`."""
        self.alarms = {name: alarm for name, alarm in self.alarms.items() if alarm[0] <= step}

    def eta(self) -> float | None:
        """Return the seconds left at the pace of the latest steps.

        None with fewer than two steps, or after the last one.
        """
        if not self.total_steps or len(self.stamps) < 2:
            return None
        first, then = self.stamps[0]
        last, now = self.stamps[-1]
        left = self.total_steps - last
        if last <= first or left <= 0:
            return None
        return (now - then) / (last - first) * left

    def line(self) -> str:
        """Return the latest step as one line; validation appears only in steps that ran one."""
        parts = [f"step {self.step}"]
        if self.total_steps:
            parts[0] += f"/{self.total_steps}"
        shown = [series for series in self.series if series.in_line]
        if self.validation:
            shown.insert(1, self.validation)
        for series in shown:
            if (value := figure(self.latest, series.metrics)) is not None:
                text = f"{series.name} {series.format(value)}"
                if series is self.validation:
                    text += f" (first {series.format(series.values[0])})"
                parts.append(text)
        if outcomes := self.outcomes():
            parts.append(outcomes)
        if seconds := figure(self.latest, run_summary.SECONDS):
            parts.append(f"{duration(seconds)}/step")
        if (eta := self.eta()) is not None:
            parts.append(f"eta {duration(eta)}")
        return "  ".join(parts)

    def outcomes(self) -> str:
        """Return the shares of episodes by outcome, the most common first."""
        prefix = "agent/outcome/"
        found = [
            (share, name.removeprefix(prefix))
            for name, share in self.latest.items()
            if name.startswith(prefix)
        ]
        return ", ".join(f"{share:.0%} {name}" for share, name in sorted(found, reverse=True))
