"""Console tracker on stderr: a live panel on a terminal, otherwise one plain line per step."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from rlctl.debugging import call_on_breakpoint
from rlctl.safe_console import SafeConsole
from rlctl.text import duration
from rlctl.tracking.alarms import Alarm
from rlctl.tracking.jsonl import METRICS_FILE, metric_rows
from rlctl.tracking.panel import PHASES, Panel
from rlctl.tracking.tracker import RunInfo, Sample


class ConsoleTracker:
    """Tracker that shows startup phases, then the panel; other output appears above it."""

    def __init__(self) -> None:
        self.console = SafeConsole(stderr=True)
        self.live: Live | None = None
        self.panel = Panel()
        self.phase_began = time.monotonic()
        self.phase_name: str | None = None
        self.states: Mapping[str, int] = {}  # number of episodes
        self.started = False
        if is_terminal(self.console):
            from rlctl.tracking.live_panel import LivePanel

            self.panel = LivePanel(doing=self.doing)
            self.live = live_display(self.console, self.panel)
            call_on_breakpoint(self._end_panel)

    def start(self, run: RunInfo) -> None:
        """End the startup: show the run's name and steps from now on."""
        self._end_startup_phase()
        self.started = True
        self.panel.name = run.name
        self.panel.total_steps = run.total_steps
        for row in metric_rows(run.folder / METRICS_FILE):
            self.panel.add_validation(int(row["step"]), row)

    def phase(self, name: str) -> None:
        """Show the phase that begins; each phase of the startup also leaves a timed line."""
        self._end_startup_phase()
        self.phase_name, *_ = PHASES.get(name, (name,))
        self.phase_began = time.monotonic()
        if self.live:
            self._show()
        elif not self.started:
            self.console.print(
                f"[{self.phase_began - self.panel.began:6.1f} s] {name}",
                soft_wrap=True,
            )

    def episodes(self, states: Mapping[str, int]) -> None:
        """Show the number of episodes in each state beside the phase."""
        self.states = states

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step in the panel, or print them as one line."""
        self.panel.add(step, metrics, time.monotonic())
        if self.live:
            self._show()
        else:
            self.console.print(self.panel.line(), soft_wrap=True)

    def alarm(self, alarm: Alarm) -> None:
        """Show an alarm in the panel, and print it permanently above."""
        self.panel.alarm(alarm)
        mark = ("alarm", "bold red")
        if alarm.over:
            mark = ("alarm over", "bold green")
        self.console.print(Text.assemble(mark, f": {alarm}"), soft_wrap=True)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Do nothing: samples are for files and dashboards."""

    def finish(self, state: str) -> None:  # noqa: ARG002
        """Remove the live panel."""
        if self.live:
            self.live.stop()

    def _end_panel(self) -> None:
        """Print lines instead of the panel, which would redraw over a debugger."""
        if self.live:
            self.live.stop()
            self.live = None

    def _end_startup_phase(self) -> None:
        if not self.started and self.phase_name and self.live:
            line = Text.assemble(
                ("✓ ", "green"),
                f"{self.phase_name} ",
                (duration(time.monotonic() - self.phase_began), "dim"),
            )
            self.console.print(line)
            self.phase_name = None

    def _show(self) -> None:
        """Start the display and draw it now.

        Rich does not erase a display that its thread draws for the first time during a print.
        """
        if self.live:
            self.live.start(refresh=True)

    def doing(self) -> str:
        """Return the phase, its seconds and the numbers of episodes."""
        if not self.phase_name:
            return ""
        doing = f"{self.phase_name} … {duration(time.monotonic() - self.phase_began)}"
        states = ", ".join(
            f"{number} {state.replace('_', ' ')}" for state, number in self.states.items()
        )
        if not states:
            return doing
        return f"{doing}  {states}"


def is_terminal(console: Console) -> bool:
    """Return True if the console can redraw; a pipe cannot, even if FORCE_COLOR is set."""
    return console.file.isatty() and not console.is_dumb_terminal


def live_display(console: Console, shown: RenderableType) -> Live:
    """Build a display that redraws `shown` and disappears at the end.

    Output to stderr, and to stdout if it is a terminal, is printed above the display.
    """
    return Live(
        console=console,
        get_renderable=lambda: shown,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    )
