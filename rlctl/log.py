"""Standard logging on stderr: "warning: TEXT", "error: TEXT", or the plain text of an info record.

Modules below the CLI log through `logging.getLogger(__name__)`. The `rlctl` command and the worker
processes install the handler; a program that imports rlctl configures logging as it likes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from rlctl.redaction import redact
from rlctl.terminal import visible

_LOGGER = logging.getLogger("rlctl")


class StderrHandler(logging.Handler):
    """Handler that prints to the current `sys.stderr`, one record per line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record without secrets and flush. A closed or vanished terminal is ignored."""
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        with suppress(OSError, ValueError):
            message = visible(redact(record.getMessage()))
            print(f"{prefix}{message}", file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """Print info records and above of rlctl's loggers on stderr, in this process and its forks."""
    if not any(isinstance(handler, StderrHandler) for handler in _LOGGER.handlers):
        _LOGGER.addHandler(StderrHandler())
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False  # libraries install root handlers, which would print it twice


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Call `log_to_stderr` for the length of the block, then restore the logger."""
    before = list(_LOGGER.handlers), _LOGGER.level, _LOGGER.propagate
    log_to_stderr()
    try:
        yield
    finally:
        _LOGGER.handlers[:] = before[0]
        _LOGGER.propagate = before[2]
        _LOGGER.setLevel(before[1])


@cache
def warn_once(message: str) -> None:
    """Log a warning that this process has not logged before."""
    _LOGGER.warning("%s", message)
