"""Seconds of a step by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds by phase since the last `take`. `on_phase` is called when a phase begins."""

    on_phase: Callable[[str], None]
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, excluding phases that begin inside it: all phases add up to the step."""
        self.on_phase(name)
        nested = sum(self.seconds.values())
        begin = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begin
            self.seconds[name] += elapsed - (sum(self.seconds.values()) - nested)

    def take(self) -> dict[str, float]:
        """Return the seconds by phase and reset them."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken
