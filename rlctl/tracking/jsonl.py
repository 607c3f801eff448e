"""Record of a run as JSON lines: `metrics.jsonl` (the source of truth) and `generations/`.

Each step writes one line without buffering, so a killed process loses at most the line that it was
writing. Readers skip such an incomplete last line.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from rlctl.errors import ConfigError
from rlctl.files import replacing, step_name
from rlctl.log import warn_once
from rlctl.tracking.episodes import Episode
from rlctl.tracking.tracker import RunInfo, Sample

METRICS_FILE = "metrics.jsonl"

MAX_PENDING = 20_000  # samples kept in memory: about 40 MB of 2 kB each
OnBroken = Callable[[str, Sequence[int]], object]  # message, numbers of the lines from 1


def generations_file(folder: Path, step: int) -> Path:
    """Return the file of the validation samples of `step` in a run's folder."""
    return folder / "generations" / f"{step_name(step)}.jsonl"


log = logging.getLogger(__name__)


class JsonlTracker:
    """Tracker that writes `metrics.jsonl` and `generations/`.

    Floats read back as the same bits; NaN and infinities are written as null. A row that cannot be
    written stays in memory, leaves no partial line in the file, and is written with the next row;
    so do samples, up to `MAX_PENDING` of them.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self.file: FileIO | None = None
        self.end = 0  # end of the last complete row in the file, in bytes
        self.pending = b""
        self.pending_samples: dict[int, Sequence[Sample]] = {}

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
        self._write_samples()

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Write all validation samples of a step to `generations/step_N.jsonl`.

        Raises OSError if the disk refuses, also when older samples are dropped from memory.
        """
        self.pending_samples[step] = samples
        self._write_samples()

    def finish(self, state: str) -> None:  # noqa: ARG002
        """Write pending rows and samples, and close the file."""
        if self.file is not None:
            try:
                self._write()
                self._write_samples()
            finally:
                self.file.close()

    def _write_samples(self) -> None:
        for step, samples in list(self.pending_samples.items()):
            try:
                write_samples(generations_file(self.folder, step), samples)
            except OSError:
                self._drop_oldest_samples()
                raise
            except (TypeError, ValueError) as error:  # they will never be JSON
                log.warning("the validation samples of step %d are not written: %s", step, error)
            del self.pending_samples[step]

    def _drop_oldest_samples(self) -> None:
        """Keep at most `MAX_PENDING` samples, but always those of the last step."""
        while (
            len(self.pending_samples) > 1
            and sum(map(len, self.pending_samples.values())) > MAX_PENDING
        ):
            step = next(iter(self.pending_samples))
            del self.pending_samples[step]
            log.warning("the disk is full: the validation samples of step %d are lost", step)

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


def metric_rows(path: Path, on_broken: OnBroken | None = None) -> Iterator[dict[str, float]]:
    """Yield the rows of a `metrics.jsonl`, oldest first, null as NaN; nothing without a file.

    A broken line is no object of numbers with `step`; see `read_lines`.
    """
    for row in read_lines(path, on_broken, _is_metrics):
        yield {name: math.nan if value is None else value for name, value in row.items()}


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return all `metric_rows`."""
    return list(metric_rows(path))


def read_generations(path: Path) -> list[Sample]:
    """Return the samples of a `generations/step_N.jsonl`; empty if there is no file.

    Raises ConfigError for missing or unknown fields.
    """
    try:
        return [_sample(row) for row in read_lines(path)]
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"a line is not a sample: {error}", where=str(path)) from error


def _sample(row: Mapping[str, Any]) -> Sample:
    episode = row.get("episode")
    images = tuple(map(str, row.get("images", ())))
    episode = Episode.from_dict(episode) if episode else None
    return Sample(**{**row, "episode": episode, "images": images})


@dataclass
class Position:
    """Place in a file after `line` lines, which end at byte `offset`."""

    offset: int = 0
    line: int = 0


def read_lines(
    path: Path,
    on_broken: OnBroken | None = None,
    valid: Callable[[dict[str, Any]], bool] = lambda _: True,
    position: Position | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file, which may be missing or still growing.

    An unterminated last line is skipped. So are broken lines, which are no JSON object or not
    `valid`: after the last line `on_broken` receives their description and numbers; by default it
    is logged as a warning, once. Reading starts at `position`, which moves with the lines read.
    """
    if not path.exists():
        return
    at = position or Position()
    broken: list[int] = []
    with path.open("rb") as file:
        file.seek(at.offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            at.offset += len(line)
            at.line += 1
            row = json_object(line)
            if row is None or not valid(row):
                broken.append(at.line)
            else:
                yield row
    if broken:
        message = (
            f"skipped a broken line at {path}:{broken[0]}"
            if len(broken) == 1
            else f"skipped {len(broken)} broken lines, the first at {path}:{broken[0]}"
        )
        if on_broken is None:
            warn_once(message)
        else:
            on_broken(message, broken)


def json_object(line: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in `line`, None if there is none."""
    row = parse_json(line)
    return row if isinstance(row, dict) else None


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, None if it is not valid JSON."""
    try:
        return orjson.loads(text)
    except ValueError:
        pass
    try:  # NaN, infinities, integers above 64 bits, and bytes that are no UTF-8
        return json.loads(text.decode(errors="replace") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):
        return None


def _is_metrics(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("step"), int) and all(
        value is None or isinstance(value, int | float) for value in row.values()
    )


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
    plain = sample | {"score": _number(sample["score"]), "components": components}
    plain |= {name: finite(sample[name]) for name in ("ground_truth", "episode")}
    return {name: value for name, value in plain.items() if value or name != "images"}


def finite(value: Any) -> Any:
    """Replace NaN and infinities in nested data by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return _number(value) if isinstance(value, float) else value
