"""Limits of the requests that asynchronous reward functions send.

They apply to a run: all its asynchronous functions share one process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rlctl.runtime.rewards.request_limits import RequestSettings

_WINDOW_S = 60.0


@dataclass(eq=False)
class Charge:
    """Tokens of a request; `tokens` is an estimate until the reply gives the number."""

    tokens: int
    at: float = 0.0  # when the request started
    counts: bool = False  # it started in the last 60 seconds


class Limiter:
    """Queue of requests: at most so many at a time, and so many requests and tokens per minute."""

    def __init__(self, settings: RequestSettings) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._turn = asyncio.Lock()  # first come, first served
        self._recent: deque[Charge] = deque()
        self._tokens = 0  # of `_recent`
        self._paused_until = 0.0

    @asynccontextmanager
    async def slot(self, tokens: int) -> AsyncIterator[Charge]:
        """Wait until a request of `tokens` may start; the block sends it."""
        async with self._slots:
            charge = Charge(tokens)
            async with self._turn:
                while (delay := self._delay(tokens)) > 0:
                    await asyncio.sleep(delay)
                charge.at = time.monotonic()
                charge.counts = True
                self._recent.append(charge)
                self._tokens += tokens
            yield charge

    def correct(self, charge: Charge, tokens: int) -> None:
        """Set the number of tokens that a request has used."""
        if charge.counts:
            self._tokens += tokens - charge.tokens
        charge.tokens = tokens

    def pause(self, seconds: float) -> None:
        """Start no request for `seconds`: the server asks for it."""
        self._paused_until = max(self._paused_until, time.monotonic() + seconds)

    def _delay(self, tokens: int) -> float:
        """Return the seconds until the next request may start, as far as is known now."""
        now = time.monotonic()
        limits = self._settings
        while self._recent and self._recent[0].at <= now - _WINDOW_S:
            old = self._recent.popleft()
            old.counts = False
            self._tokens -= old.tokens
        if now < self._paused_until:
            return self._paused_until - now
        is_full = limits.max_rpm is not None and len(self._recent) >= limits.max_rpm
        if limits.max_tpm is not None and self._recent:
            is_full = is_full or self._tokens + tokens > limits.max_tpm
        if not is_full:
            return 0.0
        return self._recent[0].at + _WINDOW_S - now
