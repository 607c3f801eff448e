"""Line chart with bands as an SVG file, for figures of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 120, 28, 40  # margins; the legend is on the right
COLORS = ("#264653", "#2a9d8f", "#e9a23b", "#3b7dd8", "#c8553d", "#8e5ea2", "#777777", "#111111")


@dataclass(frozen=True)
class Line:
    """Points (x, lowest, middle, highest) with x in increasing order."""

    points: Sequence[tuple[float, float, float, float]]


def write_line_chart(
    path: Path, title: str, axes: tuple[str, str], lines: Mapping[str, Line], top: float
) -> None:
    """Write a chart of named `lines` with y from 0 to `top` and the names of both `axes`."""
    last = max(point[0] for line in lines.values() for point in line.points) or 1.0

    def x_of(value: float) -> float:
        return round(LEFT + value / last * (WIDTH - LEFT - RIGHT), 1)

    def y_of(value: float) -> float:
        return round(HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM), 1)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x}" y="{y}" {more}>{escape(words)}</text>'

    middle = 'text-anchor="middle"'
    right, bottom = x_of(last), y_of(0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 16, title, 'font-weight="bold"'),
        text((LEFT + right) / 2, HEIGHT - 6, axes[0], middle),
        text(14, HEIGHT / 2, axes[1], f'{middle} transform="rotate(-90 14 {HEIGHT / 2})"'),
    ]
    for fifth in range(6):
        y, x = top * fifth / 5, last * fifth / 5
        parts += [
            f'<line x1="{LEFT}" x2="{right}" y1="{y_of(y)}" y2="{y_of(y)}" stroke="#ddd"/>',
            text(LEFT - 6, y_of(y) + 4, f"{y:g}", 'text-anchor="end"'),
            text(x_of(x), bottom + 16, f"{x:g}", middle),
        ]
    for number, (name, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        band = [(x, low) for x, low, _, _ in line.points]
        band += [(x, high) for x, _, _, high in reversed(line.points)]
        corners = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in band)
        path_of = " ".join(f"{x_of(x)},{y_of(y)}" for x, _, y, _ in line.points)
        y = TOP + 14 + 18 * number
        parts += [
            f'<polygon points="{corners}" fill="{color}" fill-opacity="0.15"/>',
            f'<polyline points="{path_of}" fill="none" stroke="{color}" stroke-width="2"/>',
            text(right + 12, y, name, f'fill="{color}"'),
        ]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
