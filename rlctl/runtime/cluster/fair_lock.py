"""Lock that is passed on between threads."""

from __future__ import annotations

from threading import Lock

from rlctl.runtime.base.clock import timed


class FairLock:
    """Lock that a waiting thread gets before the one that releases it can take it again.

    A wait for it is a phase of the step.
    """

    def __init__(self, phase_name: str) -> None:
        self.phase_name = phase_name
        self._next, self._held = Lock(), Lock()

    def __enter__(self) -> None:
        with self._next:
            if not self._held.acquire(blocking=False):
                with timed(self.phase_name):
                    self._held.acquire()

    def __exit__(self, *error: object) -> None:
        self._held.release()
