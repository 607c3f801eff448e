"""Record of a run as JSON lines: `metrics.jsonl` (the source of truth) and `generations/`.

Each step writes one line without buffering, so a killed process loses at most the line that it was
writing. Readers skip such an incomplete last line.
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
from rlctl.files import replacing
from rlctl.tracking.tracker import RunInfo, Sample

METRICS_FILE = "metrics.jsonl"


def generations_file(folder: Path, step: int) -> Path:
    """Return the file of the validation samples of `step` in a run's folder."""
    return folder / "generations" / f"step_{step:06d}.jsonl"


class JsonlTracker:
    """Tracker that writes `metrics.jsonl` and `generations/`.

    Floats read back as the same bits; NaN and infinities are written as null. A row that cannot be
    written stays in memory, leaves no partial line in the file, and is written with the next row.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self.file: FileIO | None = None
        self.end = 0  # end of the last complete row in the file, in bytes
        self.pending = b""

    def start(self, run: RunInfo) -> None:
        """Open `metrics.jsonl` for appending, without an incomplete last line."""
        self.folder = run.folder
        path = run.folder / METRICS_FILE
        drop_torn_tail(path)
        self.file = path.open("ab", buffering=0)
        self.end = self.file.tell()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step as one row; raise OSError if the disk refuses."""
        row = {"step": step} | {name: _number(value) for name, value in metrics.items()}
        self.pending += json.dumps(row, allow_nan=False).encode() + b"\n"
        self._write()

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Write all validation samples of a step to `generations/step_N.jsonl`."""
        write_samples(generations_file(self.folder, step), samples)

    def finish(self, state: str) -> None:  # noqa: ARG002
        """Write pending rows and close the file."""
        if self.file is not None:
            try:
                self._write()
            finally:
                self.file.close()

    def _write(self) -> None:
        """Write pending rows after the last complete one, over any partial row; raise OSError."""
        assert self.file is not None
        self.file.truncate(self.end)
        written = self.file.write(self.pending)
        if written < len(self.pending):
            self.file.truncate(self.end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), METRICS_FILE)
        self.end += written
        self.pending = b""


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write one JSON line per sample; the file appears only when it is complete."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as aside, aside.open("w", encoding="utf-8") as file:
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


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a `metrics.jsonl`, oldest first, null as NaN; empty if there is no file.

    Raises ConfigError for a line that is not an object of numbers with `step`. An incomplete last
    line is skipped.
    """
    rows = [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in read_lines(path)
    ]
    for number, row in enumerate(rows, start=1):
        if "step" not in row or not all(isinstance(value, int | float) for value in row.values()):
            raise ConfigError(
                "a row of metrics must have `step` and only numbers", where=f"{path}:{number}"
            )
    return rows


def read_generations(path: Path) -> list[Sample]:
    """Return the samples of a `generations/step_N.jsonl`; empty if there is no file.

    Raises ConfigError as `read_metrics` does, and for missing or unknown fields.
    """
    try:
        return [Sample(**row) for row in read_lines(path)]
    except TypeError as error:
        raise ConfigError(f"a line is not a sample: {error}", where=str(path)) from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file, which may be missing or still growing.

    A last line without a newline is skipped. Raises ConfigError for a line that is no JSON object.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"not valid JSON: {error}", where=f"{path}:{number}") from error
            if not isinstance(row, dict):
                raise ConfigError(
                    f"a line must be a JSON object, found {type(row).__name__}",
                    where=f"{path}:{number}",
                )
            yield row


def drop_torn_tail(path: Path) -> None:
    """Remove an incomplete last line, left by a killed process or a full disk."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            os.fsync(file.fileno())


def _number(value: float) -> float | int | None:
    """Convert a number (also of numpy or torch) to a Python int or float, None if not finite."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _plain(sample: dict[str, Any]) -> dict[str, Any]:
    components = {name: _number(value) for name, value in sample["components"].items()}
    return sample | {"score": _number(sample["score"]), "components": components}
