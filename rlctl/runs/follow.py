"""Files that another process is writing, also on another machine of the same disk: what is new in them, a whole line at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlctl.runs.store import Run, RunStore

POLL_S = 0.25
CHUNK = 1 << 20  # bytes read at once


def reread(run: Run) -> Run:
    """The run as it stands now."""
    return RunStore.at(None).find(str(run.path))


class Tail:
    """The lines of a file, as they come. A file that is not there yet has none; one that became shorter, or another, begins anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode: int | None = None
        self.position = 0
        self.rest = b""

    def lines(self, last: bool = False) -> Iterator[str]:
        """What was added since the last time, without the ends of lines; an unfinished line only if nothing will come after it."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            self._begin_anew_if_replaced()
            file.seek(self.position)
            while chunk := file.read(CHUNK):
                self.position += len(chunk)
                *whole, self.rest = (self.rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        if last and self.rest:
            yield self.rest.decode(errors="replace")
            self.rest = b""

    def _begin_anew_if_replaced(self) -> None:
        status = self.path.stat()
        if status.st_ino != self.inode or status.st_size < self.position:
            self.inode, self.position, self.rest = status.st_ino, 0, b""
