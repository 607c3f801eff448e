"""Tracebacks of the first failed calls of a process, in the logs of the run."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress

from rlctl.redaction import redact

_MAX_TRACEBACKS = 3  # of a process
_MAX_TRACEBACK = 8000  # characters


class FailureLog:
    """Log of a few tracebacks."""

    def __init__(self) -> None:
        self._left = _MAX_TRACEBACKS

    def add(self, error: BaseException, path: str) -> None:
        """Write the end of a traceback to the file `path`, or to stderr if it is empty.

        Later ones are left out. A disk that is full is no failure of the call.
        """
        if not self._left:
            return
        self._left -= 1
        text = redact("".join(traceback.format_exception(error)))[-_MAX_TRACEBACK:]
        with suppress(OSError, ValueError):
            if not path:
                print(text, file=sys.stderr, flush=True)
                return
            with open(path, "a", encoding="utf-8", errors="replace") as file:
                file.write(text)


FAILURES = FailureLog()
