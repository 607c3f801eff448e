"""The run on the terminal: one live display where there is a terminal, one plain line a step where there is none. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlctl.tracking import headline as figures
from rlctl.tracking.alarms import Alarm
from rlctl.tracking.headline import figure
from rlctl.tracking.text import count, duration, percent_or_number
from rlctl.tracking.tracker import RunInfo, Sample

# The phases of a step go by the names of their timings (`timing_s/gen`); here in words.
PHASES = {
    "gen": "rollout",
    "old_log_prob": "log-probs",
    "ref": "reference log-probs",
    "adv": "advantages",
    "update_critic": "critic update",
    "update_actor": "actor update",
    "update_weights": "weights to the engine",
    "save_checkpoint": "saving a checkpoint",
    "testing": "validation",
}
ETA_WINDOW = 20  # steps: long enough to smooth, short enough to follow answers that grow


class ConsoleTracker:
    """Shows start-up phases, then step, reward, validation accuracy, KL, tokens/s, ETA and the current phase. Lines that others print to
    stdout or stderr meanwhile appear above the live display."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.spinner = Spinner("dots")
        self.began = self.phase_began = time.monotonic()
        self.phase_name: str | None = None
        self.run: RunInfo | None = None
        self.step: int | None = None
        self.latest: dict[str, float] = {}
        self.first_validation: tuple[str, float] | None = None
        self.stamps: deque[tuple[int, float]] = deque(maxlen=ETA_WINDOW + 1)
        # A pipe is no place to redraw, even where FORCE_COLOR makes rich take it for a terminal.
        self.live = _live(self.console, self._render) if sys.stderr.isatty() and not self.console.is_dumb_terminal else None

    def start(self, run: RunInfo) -> None:
        self._end_startup_phase()
        self.run = run

    def phase(self, name: str) -> None:
        """What the run does from now on. A phase before `start` leaves a line with its time: that is what starting up takes."""
        self._end_startup_phase()
        self.phase_name, self.phase_began = PHASES.get(name, name), time.monotonic()
        if self.live:
            self.live.start()
        elif self.run is None:
            self.console.print(f"[{self.phase_began - self.began:6.1f} s] {name}", markup=False, soft_wrap=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.latest |= metrics
        metric = figures.validation_metric(metrics)
        if metric and self.first_validation is None:
            self.first_validation = (metric, metrics[metric])
        self.stamps.append((step, time.monotonic()))
        if self.live:
            self.live.start()
        else:
            self.console.print(self.line(metrics), markup=False, soft_wrap=True)

    def alarm(self, alarm: Alarm) -> None:
        mark = ("alarm over", "bold green") if alarm.over else ("alarm", "bold red")
        self.console.print(Text.assemble(mark, f": {alarm}"), soft_wrap=True)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Samples are for files and dashboards."""

    def finish(self, state: str) -> None:  # noqa: ARG002
        if self.live:
            self.live.stop()

    def line(self, metrics: Mapping[str, float]) -> str:
        """One step as a line of text; `metrics` are that step's, so that a validation shows only where it took place."""
        total = f"/{self.run.total_steps}" if self.run else ""
        parts = [f"step {self.step}{total}", *(f"{name} {value}" for name, value in self._figures(metrics))]
        if seconds := figure(metrics, figures.SECONDS):
            parts.append(f"{duration(seconds)}/step")
        if (eta := self.eta()) is not None:
            parts.append(f"eta {duration(eta)}")
        return "  ".join(parts)

    def eta(self) -> float | None:
        """Seconds to the last step at the pace of the latest steps, or None before two steps were seen or after the last."""
        if self.run is None or len(self.stamps) < 2:
            return None
        (first, then), (last, now) = self.stamps[0], self.stamps[-1]
        left = self.run.total_steps - last
        return (now - then) / (last - first) * left if last > first and left > 0 else None

    def _figures(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Name and text of every figure that these metrics have."""
        shown = [
            (name, form(value))
            for name, names, form in (
                ("reward", figures.REWARD, "{:.3f}".format),
                ("loss", figures.LOSS, "{:.4f}".format),
                ("kl", figures.KL, "{:.2g}".format),
                ("length", figures.LENGTH, "{:.0f}".format),
                ("tok/s", figures.THROUGHPUT, count),
            )
            if (value := figure(metrics, names)) is not None
        ]
        if self.first_validation and (value := figure(metrics, (self.first_validation[0],))) is not None:
            metric, first = self.first_validation
            name = "val loss" if figures.lower_is_better(metric) else "val acc"
            shown.insert(1, (name, f"{percent_or_number(metric, value)} (first {percent_or_number(metric, first)})"))
        return shown

    def _end_startup_phase(self) -> None:
        if self.run is None and self.phase_name and self.live:
            line = Text.assemble(("✓ ", "green"), f"{self.phase_name} ", (duration(time.monotonic() - self.phase_began), "dim"))
            self.console.print(line)
            self.phase_name = None

    def _render(self) -> RenderableType:
        """The live display, drawn by rich's thread four times a second."""
        now = time.monotonic()
        phase = f"{self.phase_name} … {duration(now - self.phase_began)}" if self.phase_name else ""
        self.spinner.update(text=Text(phase))
        if self.step is None:
            return self.spinner
        total = self.run.total_steps if self.run else 0
        head = Table.grid(padding=(0, 2))
        eta = self.eta()
        head.add_row(
            Text(f"step {self.step}/{total}", style="bold"),
            ProgressBar(total=max(total, 1), completed=self.step, width=30),
            Text(f"eta {duration(eta)}" if eta is not None else f"{duration(now - self.began)}"),
            self.spinner,
        )
        body = Text("  ").join(Text.assemble((f"{name} ", "dim"), value) for name, value in self._figures(self.latest))
        return Group(head, body)


def _live(console: Console, render: Callable[[], RenderableType]) -> Live:
    """A display that redraws itself and leaves nothing behind. A stdout that is a terminal is led around it; a file stays a file."""
    return Live(
        console=console,
        get_renderable=render,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    )
