"""Rows that a part of the suite measures, written to a file one by one.

A part that crashes, or whose deadline passes, keeps the rows that it has written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

NOTE = "note"  # table of sentences: what was not measured, and why


@dataclass(frozen=True)
class Settings:
    """Device of the suite, and the size of its work."""

    device: str  # "cpu" or "cuda"
    tiny: bool  # shapes for a CPU


@dataclass
class Recorder:
    """Writes rows of one part; `deadline` is a time of `time.monotonic`."""

    part: str
    file: TextIO
    deadline: float

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def row(self, table: str, **values: Any) -> None:
        """Write a row of `table` at once."""
        print(json.dumps({"part": self.part, "table": table, **values}), file=self.file, flush=True)

    def note(self, what: str, why: str) -> None:
        """Write that `what` was not measured."""
        self.row(NOTE, what=what, why=why)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Run the block; an error becomes a note."""
        try:
            yield
        except Exception as error:
            self.note(what, reason(error))

    def enough(self, what: str, seconds: float) -> bool:
        """Return True if `seconds` are left; else note that `what` was left out."""
        if self.left >= seconds:
            return True
        self.note(what, f"needs {seconds:.0f} s, {max(0.0, self.left):.0f} s are left")
        return False


def reason(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a file; a process that was killed may have cut the last one."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
