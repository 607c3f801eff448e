"""Rows that a rung of the ladder measures, written to a file one by one.

A rung that crashes, or whose deadline passes, keeps the rows that it has written.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

NOTE = "note"  # table of sentences: what was not measured, and why


@dataclass(frozen=True)
class Settings:
    """Device of the ladder, and the size of its work."""

    device: str  # "cpu" or "cuda"
    tiny: bool  # shapes for a CPU


@dataclass
class Recorder:
    """Writes rows of one rung; `deadline` is a time of `time.monotonic`."""

    rung: str
    file: TextIO
    deadline: float

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def row(self, table: str, **values: Any) -> None:
        """Write a row of `table` at once."""
        row = {"rung": self.rung, "table": table, **values}
        print(json.dumps(row), file=self.file, flush=True)

    def note(self, what: str, why: str, failed: bool = False) -> None:
        """Write that `what` was not measured; the rung has failed or not."""
        self.row(NOTE, what=what, why=why, failed=failed)

    @contextmanager
    def attempt(self, what: str, optional: bool = False) -> Iterator[None]:
        """Run the block; an error becomes a note, and fails the rung if it is not `optional`."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.note(what, reason(error), failed=not optional)

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
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
