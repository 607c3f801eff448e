"""Rich console that escapes control characters in all text that it prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rlctl.terminal import visible


class SafeConsole(Console):
    """Console whose control codes, such as colours, are the only ones that reach the terminal.

    Text that should show its escapes must pass `visible` first: rich drops some characters. Words
    in brackets are text, not rich's markup.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of `renderable` with control characters escaped."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
