"""Incremental reading of files that another process, possibly on another host, is writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rlctl.runs.run import Run
from rlctl.runs.store import RunStore

POLL_S = 0.25
CHUNK = 1 << 20  # bytes read at once


def reread(run: Run) -> Run:
    """Return the run in its present state."""
    return RunStore.at(None).find(str(run.path))


class Tail:
    """Reader of the lines that are appended to a file.

    The file need not exist yet. A file that was replaced or truncated is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode: int | None = None
        self.position = 0
        self.rest = b""

    def lines(self, last: bool = False) -> Iterator[str]:
        """Yield the lines added since the previous call, without line ends.

        An unterminated line is kept back until it is complete, or until `last` (no more follows).
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            self._reset_if_replaced(os.fstat(file.fileno()))
            file.seek(self.position)
            while chunk := file.read(CHUNK):
                self.position += len(chunk)
                *complete, self.rest = (self.rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in complete)
        if last and self.rest:
            yield self.rest.decode(errors="replace")
            self.rest = b""

    def _reset_if_replaced(self, status: os.stat_result) -> None:
        if status.st_ino != self.inode or status.st_size < self.position:
            self.inode, self.position, self.rest = status.st_ino, 0, b""
