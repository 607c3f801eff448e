"""Formatting for people: durations, counts, devices and sparklines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Format seconds: 4.1 s, 3m 20s, 2h 05m, 3d 4h."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24}h"


def format_resources(resources: Mapping[str, float]) -> str:
    """Format amounts of devices by name: 2 CPU, 1 GPU."""
    parts = [f"{amount:g} {name}" for name, amount in resources.items() if amount]
    return ", ".join(parts) or "nothing"


def plural(number: int, noun: str) -> str:
    """Return the number with its noun: 1 step, 2 steps."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def counted(rows: Mapping[str, int]) -> str:
    """Format numbers of rows by reason: the prompt is empty (2 rows), …."""
    return ", ".join(f"{reason} ({plural(number, 'row')})" for reason, number in rows.items())


def size(num_bytes: int) -> str:
    """Format bytes with a binary unit: 512 B, 15.3 MiB."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    value = num_bytes / 1024
    units = ["KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"


def count(number: float) -> str:
    """Format a count with three digits and a unit: 950, 12.3k, 4.56M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * limit:  # 999,500 is 1M, not 1e+03k
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draw the finite values in at most `width` characters; each shows the mean of its share."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    slots = min(width, len(finite))
    edges = [len(finite) * slot // slots for slot in range(slots + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(means)
    span = max(means) - low
    if not span:
        return BLOCKS[0] * len(means)
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)
