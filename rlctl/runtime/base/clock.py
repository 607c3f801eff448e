"""Seconds of a step by phase; the phase names are those of the `timing_s/*` metrics.

Calls time themselves on the clock that runs in their thread: see `phase`, and `dispatch`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
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

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the block's calls of `phase` in this thread count on this clock."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def take(self) -> dict[str, float]:
        """Return the seconds by phase and reset them."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


_running: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextmanager
def timed(name: str | None) -> Iterator[None]:
    """Time the block, or each call of a decorated function, if a clock runs in this thread.

    None: it is part of another phase.
    """
    block = nullcontext()
    if name and (clock := _running.get()):
        block = clock.phase(name)
    with block:
        yield
