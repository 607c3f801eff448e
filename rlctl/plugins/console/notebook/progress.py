"""Progress of a run in a notebook: the console's panel as one output block, updated in place."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.live import Live

from rlctl.safe_console import SafeConsole
from rlctl.tracking.console_tracker import ConsoleTracker
from rlctl.tracking.live_panel import LivePanel

_BETWEEN_S = 0.25  # updates
_FORM = '<pre style="white-space:pre;line-height:1.2;overflow-x:auto;margin:0">{code}</pre>'


class NotebookTracker(ConsoleTracker):
    """Console tracker that shows phases, panel and alarms in one output of the cell."""

    def __init__(self) -> None:
        super().__init__()
        self.console = _recorder()
        self.panel = self._shown = LivePanel(doing=self.doing)
        self.live = _Block(console=self.console, get_renderable=lambda: self._shown)

    def finish(self, state: str) -> None:
        """Show the final state in place of the phase."""
        self._shown.spinner.frames = [""]
        self._shown.doing = lambda: state
        super().finish(state)


class _Block(Live):
    """Display of the lines that `console` has recorded, and of the panel below them."""

    _output: Any = None  # IPython's handle
    _drawn: float = 0.0  # time.monotonic

    def start(self, refresh: bool = False) -> None:
        """Draw now, unless the last time is very recent."""
        if refresh and time.monotonic() - self._drawn > _BETWEEN_S:
            self._draw()

    def stop(self) -> None:
        """Draw the final state."""
        self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        panel = _recorder()
        panel.print(self.get_renderable())
        parts = (self.console, panel)
        texts = (
            part.export_html(inline_styles=True, code_format=_FORM, clear=False) for part in parts
        )
        drawn = HTML("".join(texts))
        if self._output is None:
            self._output = display(drawn, display_id=True)
        else:
            self._output.update(drawn)
        self._drawn = time.monotonic()


def _recorder() -> SafeConsole:
    options = {"force_jupyter": False, "force_terminal": True, "color_system": "truecolor"}
    return SafeConsole(file=io.StringIO(), record=True, width=100, **options)
