"""Durations as text: `3h50m`, `90m`, `45s`, and Slurm's `3:50:00` and `1-12:00:00`."""

from __future__ import annotations

import re
from datetime import timedelta

HINT = "write 3h50m, 90m, 45s, 3:50:00 or 1-12:00:00"
_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")  # days-hours:minutes:seconds


def parse_duration(text: str) -> timedelta | None:
    """Return the duration, or None if `text` is none, or 0."""
    match = _CLOCK.fullmatch(text) or _UNITS.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds) or None
