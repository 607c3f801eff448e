"""Deadline of a start, which passes more slowly on a busy machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rlctl.cores import allowed_cores

_MOST = 10.0  # a container sees the load of its host, which may have many more cores


def slowness() -> float:
    """Return the processes that want to run for each core, from 1 to 10."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):  # unknown on this system
        return 1.0
    return min(_MOST, max(1.0, load / allowed_cores()))


class LoadedDeadline:
    """Deadline of `seconds` on an idle machine; a start that shares its cores gets more."""

    def __init__(self, seconds: float, slowness: Callable[[], float] = slowness) -> None:
        self._left = seconds
        self._seen = time.monotonic()
        self._slowness = slowness

    def is_over(self) -> bool:
        """Return True if the time is over; a wait calls it again and again."""
        now = time.monotonic()
        self._left -= (now - self._seen) / self._slowness()
        self._seen = now
        return self._left < 0
