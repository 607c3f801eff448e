"""The record of a run as lines of JSON: `metrics.jsonl` is the truth that every other tracker mirrors, `generations/` holds the answers.

A line is written and flushed a step, so that a killed process loses at most the line it was writing; readers skip such a torn tail.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError
from rlctl.tracking.tracker import RunInfo, Sample

METRICS_FILE = "metrics.jsonl"


def generations_file(folder: Path, step: int) -> Path:
    """Where the validation answers of `step` lie in a run's folder."""
    return folder / "generations" / f"step_{step:06d}.jsonl"


class JsonlTracker:
    """Writes `metrics.jsonl` and `generations/`. Floats read back as the same bits; NaN and infinities, unknown to JSON, are null.

    A row that the disk refuses is kept, and written before the next one: no part of it stays in the file, and no row is left out.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self.file: FileIO | None = None
        self.end = 0  # of the last whole row in the file, in bytes
        self.waiting = b""

    def start(self, run: RunInfo) -> None:
        self.folder = run.folder
        path = run.folder / METRICS_FILE
        drop_torn_tail(path)
        self.file = path.open("ab", buffering=0)
        self.end = self.file.tell()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step} | {name: _number(value) for name, value in metrics.items()}
        self.waiting += json.dumps(row, allow_nan=False).encode() + b"\n"
        self._write()

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        write_samples(generations_file(self.folder, step), samples)

    def finish(self, state: str) -> None:  # noqa: ARG002
        if self.file is not None:
            try:
                self._write()
            finally:
                self.file.close()

    def _write(self) -> None:
        """Write what waits after the last whole row, in place of what a signal or a full disk left there half done. `OSError`."""
        assert self.file is not None
        self.file.truncate(self.end)
        written = self.file.write(self.waiting)
        if written < len(self.waiting):
            self.file.truncate(self.end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), METRICS_FILE)
        self.end += written
        self.waiting = b""


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """One line of JSON a sample, into a file that is whole or not there."""
    path.parent.mkdir(exist_ok=True)
    whole = path.with_suffix(".tmp")
    with whole.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(
                json.dumps(
                    _plain(dataclasses.asdict(sample)),
                    ensure_ascii=False,
                    allow_nan=False,
                    default=str,
                )
                + "\n"
            )
    whole.replace(path)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.jsonl`, oldest first; null reads as NaN. A run without metrics has no such file, and no rows.

    Errors: ConfigError for a line, other than a torn last one, that is no row: `step` and numbers.
    """
    rows = [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in read_lines(path)
    ]
    for number, row in enumerate(rows, start=1):
        if "step" not in row or not all(isinstance(value, int | float) for value in row.values()):
            raise ConfigError("a row of metrics holds `step` and numbers", where=f"{path}:{number}")
    return rows


def read_generations(path: Path) -> list[Sample]:
    """The samples of one `generations/step_N.jsonl`. Errors: ConfigError as in `read_metrics`, also for a line that lacks a field."""
    try:
        return [Sample(**row) for row in read_lines(path)]
    except TypeError as error:
        raise ConfigError(f"a line is not a sample: {error}", where=str(path)) from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines that may be absent, or being written to: a last line without its end does not count."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"not a line of JSON: {error}", where=f"{path}:{number}"
                ) from error
            if not isinstance(row, dict):
                raise ConfigError(
                    f"a line must be an object, this is {type(row).__name__}",
                    where=f"{path}:{number}",
                )
            yield row


def drop_torn_tail(path: Path) -> None:
    """Cut what a killed process or a full disk left after the last whole line, so that the next line starts on its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            os.fsync(file.fileno())


def _number(value: float) -> float | int | None:
    """As JSON writes it: ints stay ints, numpy's and torch's scalars become Python's."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _plain(sample: dict[str, Any]) -> dict[str, Any]:
    components = {name: _number(value) for name, value in sample["components"].items()}
    return sample | {"score": _number(sample["score"]), "components": components}
