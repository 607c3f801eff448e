"""Lock that is passed on between threads."""

from __future__ import annotations

from threading import Lock


class FairLock:
    """Lock that a waiting thread gets before the one that releases it can take it again."""

    def __init__(self) -> None:
        self._next, self._held = Lock(), Lock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *error: object) -> None:
        self._held.release()
