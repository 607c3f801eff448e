"""Flame graph of a trace: where a process spent its time, by nested call, as an SVG file.

The width of a box is the time of all calls with the same callers (Gregg, "The Flame Graph", CACM
2016), the boxes below it are what they called. Times come from a trace, so nothing is sampled.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

WIDTH, ROW, MARGIN = 1400, 18, 10  # pixels
_CHAR = 6.6  # pixels of a character
_NARROWEST = 0.4  # pixels: narrower boxes are left out
_DEEPEST = 120  # rows
_OPERATION = "cpu_op"
_KINDS = (_OPERATION, "user_annotation", "python_function", "kernel")
_ROUNDING_US = 0.01  # an event may end this much after the one around it


@dataclass
class Frame:
    """Calls with the same callers."""

    microseconds: float = 0.0
    calls: int = 0
    children: defaultdict[str, Frame] = field(default_factory=lambda: defaultdict(Frame))

    def add(self, microseconds: float) -> None:
        """Count a call."""
        self.microseconds += microseconds
        self.calls += 1


def frames(events: list[dict[str, Any]]) -> Frame:
    """Return the calls of a Chrome trace; its children are threads that ran operations, or streams.

    Args:
        events: `traceEvents`; times in microseconds.
    """
    threads: defaultdict[object, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _KINDS:
            threads[event["tid"]].append(event)
    root = Frame()
    for thread, calls in threads.items():
        kinds = {each["cat"] for each in calls}
        if not kinds & {_OPERATION, "kernel"}:
            continue  # a thread that waits
        name = "GPU" if "kernel" in kinds else "thread"
        found = root.children[f"{name} {thread}"]
        _nest(found, calls)
        while len(found.children) == 1:  # the way to the step says nothing
            (only,) = found.children.values()
            if not only.children:
                break
            found.children = only.children
        found.calls = 1
        found.microseconds = sum(each.microseconds for each in found.children.values())
        root.microseconds += found.microseconds
    return root


def _nest(top: Frame, calls: list[dict[str, Any]]) -> None:
    """Add calls to `top`, each below the one that contains it in time."""
    stack: list[tuple[float, Frame]] = []
    for call in sorted(calls, key=lambda each: (each["ts"], -each["dur"])):
        end = call["ts"] + call["dur"]
        while stack and end > stack[-1][0] + _ROUNDING_US:
            stack.pop()
        above = stack[-1][1] if stack else top
        frame = above.children[call["name"]]
        frame.add(call["dur"])
        stack.append((end, frame))


def write_flame_graph(trace: Path, file: Path) -> None:
    """Draw the Chrome trace JSON in `trace`. Pointing at a box shows its name, time and calls."""
    root = frames(json.loads(trace.read_text())["traceEvents"])
    boxes = list(_boxes(root, 0.0, 0, WIDTH / max(root.microseconds, 1e-9)))
    height = MARGIN * 2 + ROW * (1 + max((row for _, row, _ in boxes), default=0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * MARGIN} {height}" '
        'font-family="monospace" font-size="11">',
        f'<rect width="100%" height="{height}" fill="white"/>',
        *(box for _, _, box in boxes),
        "</svg>",
    ]
    file.write_text("\n".join(parts) + "\n")


def _boxes(frame: Frame, x: float, row: int, scale: float) -> Iterator[tuple[float, int, str]]:
    """Yield the boxes below `frame`: left edge and row, and their SVG."""
    widest_first = sorted(frame.children.items(), key=lambda each: -each[1].microseconds)
    for name, child in widest_first:
        width = child.microseconds * scale
        if width < _NARROWEST or row >= _DEEPEST:
            continue
        yield x, row, _box(name, child, x, row, width)
        yield from _boxes(child, x, row + 1, scale)
        x += width


def _box(name: str, frame: Frame, x: float, row: int, width: float) -> str:
    # One hue for operations, another for Python functions; a name has the same shade everywhere.
    hue = 30 if "aten::" in name or "Backward" in name else 200
    shade = 62 + zlib.crc32(name.encode()) % 24
    left, top = round(MARGIN + x, 2), MARGIN + ROW * row
    fits = int((width - 6) / _CHAR)
    label = name if len(name) <= fits else f"{name[: fits - 1]}…" if fits > 3 else ""
    text = f'<text x="{left + 3}" y="{top + ROW - 5}">{escape(label)}</text>' if label else ""
    hint = f"{name}: {frame.microseconds / 1e3:,.2f} ms, {frame.calls:,} calls"
    return (
        f"<g><title>{escape(hint)}</title>"
        f'<rect x="{left}" y="{top}" width="{width:.2f}" height="{ROW - 1}" '
        f'fill="hsl({hue} 70% {shade}%)"/>{text}</g>'
    )
