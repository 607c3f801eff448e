"""Progress display of a run on a terminal: a rich panel with curves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlctl.text import duration, sparkline
from rlctl.tracking.panel import PHASES, Panel
from rlctl.tracking.run_summary import figure

_BESIDE = ("gen", "reward")  # phases of the engines, beside the step of an asynchronous run
CURVE = 40  # characters
NARROW_CURVE = 12
NARROW = 90  # columns below which curves are short
NARROWER = 60  # columns below which notes are left out
BAR = 30


@dataclass
class LivePanel(Panel):
    """Panel that renders itself with rich; `doing` returns the text beside the spinner."""

    doing: Callable[[], str] = str
    spinner: Spinner = field(default_factory=lambda: Spinner("dots"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.spinner.update(text=Text(self.doing(), no_wrap=True, overflow="ellipsis"))
        if self.step is None:
            yield self.spinner
            return
        yield self._head(options.max_width)
        if options.height is None or options.height > 3:
            yield self._figures(options.max_width)
            yield from self._time(options.max_width, console.no_color)
        for since, message in self.alarms.values():
            yield Text.assemble(
                ("alarm", "bold red"),
                f" since step {since}: {message}",
                no_wrap=True,
                overflow="ellipsis",
            )

    def _head(self, width: int) -> Table:
        head = Table.grid(padding=(0, 2))
        titles: list[Text] = []
        bar_width = BAR // 3
        if width >= NARROW:
            bar_width = BAR
            if self.name:
                titles = [Text(self.name, style="bold")]
        clock = duration(time.monotonic() - self.began)
        if (eta := self.eta()) is not None:
            clock += f"  eta {duration(eta)}"
        head.add_row(
            *titles,
            Text(f"step {self.step}/{self.total_steps or '?'}", style="bold", no_wrap=True),
            ProgressBar(total=max(self.total_steps, 1), completed=self.step or 0, width=bar_width),
            Text(clock, no_wrap=True),
            self.spinner,
        )
        return head

    def _figures(self, width: int) -> Table:
        """Return one row per figure: name, latest value, curve, note."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=7, no_wrap=True)
        table.add_column(justify="right", min_width=7, no_wrap=True)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(style="dim", no_wrap=True)
        notes: dict[str, str] = {}
        if width >= NARROWER:
            notes = dict(self._notes())
        shown = list(self.series)
        if self.validation:
            shown.insert(2, self.validation)
        for series in shown:
            if series.values:
                curve = sparkline(series.values, _curve_width(width))
                table.add_row(
                    series.name, series.format(series.values[-1]), curve, notes.get(series.name, "")
                )
        return table

    def _notes(self) -> Iterator[tuple[str, str]]:
        if self.validation and self.best:
            first, best = (
                self.validation.format(value) for value in (self.validation.values[0], self.best[0])
            )
            yield self.validation.name, f"first {first}, best {best} at step {self.best[1]}"
        if (truncated := figure(self.latest, ("response_length/clip_ratio",))) is not None:
            yield "length", f"{truncated:.1%} truncated"
        if outcomes := self.outcomes():
            yield "turns", outcomes

    def _time(self, width: int, no_color: bool) -> Iterator[Table]:
        """Yield the time of the latest step, split into its phases."""
        beside: tuple[str, ...] = ()
        if "async/engines_idle" in self.latest:
            beside = _BESIDE
        parts = [
            (word, colour, self.latest.get(f"timing_s/{phase}", 0.0))
            for phase, (word, colour) in PHASES.items()
            if phase not in beside
        ]
        total = sum(seconds for _, _, seconds in parts)
        if not total > 0:
            return
        bar = Text()
        words = Text(no_wrap=True, overflow="ellipsis")
        size = _curve_width(width)
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
        if no_color:
            table.add_row("time", duration(total), words)
        else:
            table.add_row("time", duration(total), bar, words)
        yield table


def _curve_width(width: int) -> int:
    if width >= NARROW:
        return CURVE
    return NARROW_CURVE
