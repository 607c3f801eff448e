"""Time limit of chat templates, which are programs of whoever made the model."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 10.0


class TemplateTooSlow(ValueError):
    """A template has not ended within the limit."""


@contextmanager
def limited_template() -> Iterator[None]:
    """Raise TemplateTooSlow in the block after `LIMIT_S`.

    No-op outside the main thread, and where another timer runs, such as that of `--max-time`: the
    checks before the start have rendered the template.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def stop(*_: object) -> None:
        raise TemplateTooSlow(f"it has not ended within {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
