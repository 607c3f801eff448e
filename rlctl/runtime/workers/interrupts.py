"""Interruption of work that changes no weights, by a request to stop.

The controller opens a window for each step; the first call that changes weights closes it. Inside
the window a request raises `Interrupted` in the main thread: at once, or at the end of a call that
must not end halfway. A worker process raises it only where a call permits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """End of interrupted work. Ray passes on no other exception of a signal handler.

    Ray may raise a plain KeyboardInterrupt instead: see `Interrupts.raised`.
    """


class _Depth(threading.local):
    held = 0
    is_allowed = False


class Interrupts:
    """State of this process. Only the main thread is interrupted."""

    def __init__(self) -> None:
        self.is_worker = False
        self._depth = _Depth()
        self.reset()

    def __reduce__(self) -> str:
        """Pickle as the object of the other process: decorated methods of users refer to it."""
        return "INTERRUPTS"

    @contextmanager
    def window(self, late: bool = False) -> Iterator[None]:
        """Let a request interrupt the block, until `close`; a `late` one only by `expire`."""
        self.is_late = late
        self.is_open = self.is_expired or not late
        try:
            self.check()
            yield
        finally:
            self.is_open = self.is_late = False

    def expire(self) -> None:
        """Interrupt the open window, also a late one."""
        self.is_expired = True
        self.is_open |= self.is_late
        self.request()

    def reset(self) -> None:
        """Forget earlier requests of this process."""
        self.requested = self.raised = False
        self.is_open = self.is_late = self.is_expired = False
        self._depth.held = 0

    def close(self) -> None:
        """Let the rest of the window's block run to its end: it changes weights from here on.

        In a worker process the controller decides when calls may be interrupted.
        """
        self.is_open = self.is_worker

    def request(self) -> None:
        """Interrupt the open window; call it in the main thread, such as in a signal handler."""
        self.requested = True
        if self._depth.is_allowed or not (self.is_worker or self._depth.held):
            self.check()

    def check(self) -> None:
        """Raise `Interrupted` in an open window after a request."""
        if self.requested and self.is_open and _in_main_thread():
            self.raised = True
            raise Interrupted

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay an interruption of the block until its end."""
        self._depth.held += 1
        try:
            yield
        finally:
            self._depth.held -= 1
        if not (self.is_worker or self._depth.held):
            self.check()

    def permit(self) -> None:
        """Permit an interruption at this place inside one `held`."""
        with self.allowed():
            pass

    @contextmanager
    def allowed(self, alone: bool = True) -> Iterator[None]:
        """Permit interruptions of a block inside one `held`; no-op if it is not `alone`."""
        if not alone:
            yield
            return
        before = self._depth.held
        try:
            self._depth.held = max(0, before - 1)
            if not self._depth.held:
                self._depth.is_allowed = True
                self.check()
            yield
        finally:
            self._depth.is_allowed = False
            self._depth.held = before


INTERRUPTS = Interrupts()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
