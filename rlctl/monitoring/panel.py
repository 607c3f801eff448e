"""A run as a person watches it: one plain line a step, or a panel that fills with curves. Where the rows come from is the caller's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlctl.monitoring import run_summary as figures
from rlctl.monitoring.alarms import Alarm
from rlctl.monitoring.run_summary import Row, figure, lower_is_better
from rlctl.monitoring.text import count, duration, percent_or_number, sparkline

# The phases of a step go by the names of their timings (`timing_s/gen`); here in words, with a colour each.
PHASES = {
    "gen": ("rollout", "blue"),
    "reward": ("reward", "yellow"),
    "old_log_prob": ("log-probs", "cyan"),
    "ref": ("reference log-probs", "magenta"),
    "values": ("values", "bright_magenta"),
    "adv": ("advantages", "white"),
    "update_critic": ("critic update", "red"),
    "update_actor": ("actor update", "green"),
    "update_weights": ("weights to the engine", "bright_green"),
    "testing": ("validation", "bright_black"),
    "save_checkpoint": ("saving a checkpoint", "bright_yellow"),
}
ETA_WINDOW = 20  # steps: long enough to smooth, short enough to follow answers that grow
CURVE, NARROW_CURVE = 40, 12  # characters
NARROW, NARROWER = 90, 60  # terminals with fewer columns get short curves, or no remarks either
BAR = 30


@dataclass
class _Course:
    """One figure over the run: its name, the metrics of which a row has one, how its value is written, and its values so far."""

    name: str
    metrics: tuple[str, ...]
    form: Callable[[float], str]
    in_line: bool = True  # also in the plain line of a step
    values: list[float] = field(default_factory=list)


def _courses() -> list[_Course]:
    return [
        _Course("reward", figures.REWARD, "{:.3f}".format),
        _Course("loss", figures.LOSS, "{:.4f}".format),
        _Course("kl", figures.KL, "{:.2g}".format),
        _Course("entropy", ("actor/entropy",), "{:.3g}".format, in_line=False),
        _Course("length", figures.LENGTH, "{:.0f}".format),
        _Course("tok/s", figures.THROUGHPUT, count),
    ]


@dataclass
class Panel:
    """What a run shows so far. `began` is on the clock of `time.monotonic`; `doing` says what goes on now."""

    name: str = ""
    total_steps: int = 0
    began: float = field(default_factory=time.monotonic)
    doing: Callable[[], str] = str
    step: int | None = None
    latest: dict[str, float] = field(default_factory=dict)
    courses: list[_Course] = field(default_factory=_courses)
    validation: _Course | None = None
    best: tuple[float, int] | None = None  # of validation: value and step
    stamps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=ETA_WINDOW + 1))
    ringing: dict[str, tuple[int, str]] = field(
        default_factory=dict
    )  # alarms: since when, and what
    spinner: Spinner = field(default_factory=lambda: Spinner("dots"))

    def add(self, step: int, row: Row, at: float) -> None:
        """The metrics of a step that was done at `at` seconds, on any clock."""
        self.step = step
        self.latest = dict(row)
        self.stamps.append((step, at))
        for course in self.courses:
            if (value := figure(row, course.metrics)) is not None:
                course.values.append(value)
        if (metric := figures.validation_metric(row)) and self.validation is None:
            name = "val loss" if lower_is_better(metric) else "val acc"
            self.validation = _Course(
                name, (metric,), lambda value: percent_or_number(metric, value)
            )
        if self.validation and (value := figure(row, self.validation.metrics)) is not None:
            self.validation.values.append(value)
            sign = -1 if lower_is_better(self.validation.metrics[0]) else 1
            if self.best is None or sign * value > sign * self.best[0]:
                self.best = value, step

    def alarm(self, alarm: Alarm) -> None:
        """An alarm that begins or ends."""
        if alarm.over:
            self.ringing.pop(alarm.name, None)
        else:
            self.ringing[alarm.name] = alarm.step, alarm.message

    def clear(self) -> None:
        """Forget all steps: the run went back, and its rows come once more."""
        self.step, self.latest, self.courses, self.validation, self.best = (
            None,
            {},
            _courses(),
            None,
            None,
        )
        self.stamps.clear()

    def forget_alarms_after(self, step: int) -> None:
        """What was seen after `step` has not happened."""
        self.ringing = {name: alarm for name, alarm in self.ringing.items() if alarm[0] <= step}

    def eta(self) -> float | None:
        """Seconds to the last step at the pace of the latest steps, or None before two steps were seen or after the last."""
        if not self.total_steps or len(self.stamps) < 2:
            return None
        (first, then), (last, now) = self.stamps[0], self.stamps[-1]
        left = self.total_steps - last
        return (now - then) / (last - first) * left if last > first and left > 0 else None

    def line(self) -> str:
        """The latest step as a line of text, in which a validation shows only where it took place."""
        total = f"/{self.total_steps}" if self.total_steps else ""
        parts = [f"step {self.step}{total}"]
        shown = [course for course in self.courses if course.in_line]
        for course in [*shown[:1], *([self.validation] if self.validation else []), *shown[1:]]:
            if (value := figure(self.latest, course.metrics)) is not None:
                first = (
                    f" (first {course.form(course.values[0])})" if course is self.validation else ""
                )
                parts.append(f"{course.name} {course.form(value)}{first}")
        if seconds := figure(self.latest, figures.SECONDS):
            parts.append(f"{duration(seconds)}/step")
        if (eta := self.eta()) is not None:
            parts.append(f"eta {duration(eta)}")
        return "  ".join(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.spinner.update(text=Text(self.doing()))
        if self.step is None:
            yield self.spinner
            return
        yield self._head(options.max_width)
        if options.height is None or options.height > 3:
            yield self._figures(options.max_width)
            yield from self._time(options.max_width, console.no_color)
        for since, message in self.ringing.values():
            yield Text.assemble(
                ("alarm", "bold red"),
                f" since step {since}: {message}",
                no_wrap=True,
                overflow="ellipsis",
            )

    def _head(self, width: int) -> Table:
        head = Table.grid(padding=(0, 2))
        eta, done = self.eta(), duration(time.monotonic() - self.began)
        head.add_row(
            *([Text(self.name, style="bold")] if self.name and width >= NARROW else []),
            Text(f"step {self.step}/{self.total_steps or '?'}", style="bold", no_wrap=True),
            ProgressBar(
                total=max(self.total_steps, 1),
                completed=self.step or 0,
                width=BAR if width >= NARROW else BAR // 3,
            ),
            Text(done + (f"  eta {duration(eta)}" if eta is not None else ""), no_wrap=True),
            self.spinner,
        )
        return head

    def _figures(self, width: int) -> Table:
        """A line a figure: name, latest value, course, and what else is worth saying."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=7, no_wrap=True)
        table.add_column(justify="right", min_width=7, no_wrap=True)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(style="dim", no_wrap=True)
        notes = dict(self._notes()) if width >= NARROWER else {}
        for course in [
            *self.courses[:2],
            *([self.validation] if self.validation else []),
            *self.courses[2:],
        ]:
            if course.values:
                curve = sparkline(course.values, CURVE if width >= NARROW else NARROW_CURVE)
                table.add_row(
                    course.name, course.form(course.values[-1]), curve, notes.get(course.name, "")
                )
        return table

    def _notes(self) -> Iterator[tuple[str, str]]:
        if self.validation and self.best:
            first, best = (
                self.validation.form(value) for value in (self.validation.values[0], self.best[0])
            )
            yield self.validation.name, f"first {first}, best {best} at step {self.best[1]}"
        if (truncated := figure(self.latest, ("response_length/clip_ratio",))) is not None:
            yield "length", f"{truncated:.1%} truncated"

    def _time(self, width: int, no_color: bool) -> Iterator[Table]:
        """Where the time of the latest step went."""
        parts = [
            (word, colour, self.latest.get(f"timing_s/{phase}", 0.0))
            for phase, (word, colour) in PHASES.items()
        ]
        total = sum(seconds for _, _, seconds in parts)
        if not total > 0:
            return
        bar, words = Text(), Text(no_wrap=True, overflow="ellipsis")
        size = CURVE if width >= NARROW else NARROW_CURVE
        for _, colour, seconds in parts:
            bar.append("█" * (round(size * seconds / total)), style=colour)
        for word, colour, seconds in sorted(parts, key=lambda part: -part[2])[:4]:
            if seconds > 0.02 * total:
                words.append(f"{word} ", style=colour).append(
                    f"{seconds / total:.0%}  ", style="dim"
                )
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=7, no_wrap=True)
        table.add_column(justify="right", min_width=7, no_wrap=True)
        table.add_row("time", duration(total), *([] if no_color else [bar]), words)
        yield table
