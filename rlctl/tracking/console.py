"""The run on the terminal: one live panel where there is a terminal, one plain line a step where there is none. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from rlctl.monitoring.alarms import Alarm
from rlctl.monitoring.panel import PHASES, Panel
from rlctl.monitoring.text import duration
from rlctl.tracking.tracker import RunInfo, Sample


class ConsoleTracker:
    """Shows start-up phases, then the panel. Lines that others print to stdout or stderr meanwhile appear above the live display."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.panel = Panel(doing=self._doing)
        self.phase_began = time.monotonic()
        self.phase_name: str | None = None
        self.started = False
        self.live = live_display(self.console, self.panel) if is_terminal(self.console) else None

    def start(self, run: RunInfo) -> None:
        self._end_startup_phase()
        self.started = True
        self.panel.name, self.panel.total_steps = run.name, run.total_steps

    def phase(self, name: str) -> None:
        """What the run does from now on. A phase before `start` leaves a line with its time: that is what starting up takes."""
        self._end_startup_phase()
        self.phase_name, self.phase_began = (
            PHASES[name][0] if name in PHASES else name,
            time.monotonic(),
        )
        if self.live:
            self.live.start()
        elif not self.started:
            self.console.print(
                f"[{self.phase_began - self.panel.began:6.1f} s] {name}",
                markup=False,
                soft_wrap=True,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.panel.add(step, metrics, time.monotonic())
        if self.live:
            self.live.start()
        else:
            self.console.print(self.panel.line(), markup=False, soft_wrap=True)

    def alarm(self, alarm: Alarm) -> None:
        """Above the panel it stays when the panel is gone."""
        self.panel.alarm(alarm)
        mark = ("alarm over", "bold green") if alarm.over else ("alarm", "bold red")
        self.console.print(Text.assemble(mark, f": {alarm}"), soft_wrap=True)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Samples are for files and dashboards."""

    def finish(self, state: str) -> None:  # noqa: ARG002
        if self.live:
            self.live.stop()

    def _end_startup_phase(self) -> None:
        if not self.started and self.phase_name and self.live:
            line = Text.assemble(
                ("✓ ", "green"),
                f"{self.phase_name} ",
                (duration(time.monotonic() - self.phase_began), "dim"),
            )
            self.console.print(line)
            self.phase_name = None

    def _doing(self) -> str:
        return (
            f"{self.phase_name} … {duration(time.monotonic() - self.phase_began)}"
            if self.phase_name
            else ""
        )


def is_terminal(console: Console) -> bool:
    """Whether there is something to redraw on: a pipe is not, even where FORCE_COLOR makes rich take it for a terminal."""
    return console.file.isatty() and not console.is_dumb_terminal


def live_display(console: Console, shown: RenderableType) -> Live:
    """A display that redraws itself and leaves nothing behind. A stdout that is a terminal is led around it; a file stays a file."""
    return Live(
        console=console,
        get_renderable=lambda: shown,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    )
