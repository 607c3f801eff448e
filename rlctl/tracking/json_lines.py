"""Reading of JSON lines files, which may be missing, damaged or still growing."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import orjson

from rlctl.files import open_record
from rlctl.log import warn_once

METRICS_FILE = "metrics.jsonl"

OnBroken = Callable[[str, Sequence[int]], object]  # message, numbers of the lines from 1
_MARK_BYTES = 4096


@dataclass
class Position:
    """Place in a file after `line` lines, which end at byte `offset`.

    `mark` is a checksum of the last bytes before it.
    """

    offset: int = 0
    line: int = 0
    mark: int = 0

    def num_bytes_after(self, path: Path) -> int | None:
        """Return what the file has grown by since it was read up to here; None if it is another."""
        try:
            with open_record(path) as file:
                after = os.fstat(file.fileno()).st_size - self.offset
                is_same = self.offset >= 0 <= after and _checksum(file, self.offset) == self.mark
        except OSError:
            return None
        if not is_same:
            return None
        return after


def _checksum(file: IO[bytes], end: int) -> int:
    start = max(0, end - _MARK_BYTES)
    file.seek(start)
    return crc32(file.read(end - start))


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
    with open_record(path) as file:
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
        at.mark = _checksum(file, at.offset)
    if broken:
        (on_broken or _warn)(broken_message(path, broken[0], len(broken)), broken)


def broken_message(path: Path, first: int, number: int) -> str:
    """Return the message on `number` skipped lines of a file."""
    if number == 1:
        return f"skipped a broken line at {path}:{first}"
    return f"skipped {number} broken lines, the first at {path}:{first}"


def _warn(message: str, _: Sequence[int]) -> None:
    warn_once(message)


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


def is_metrics(row: Mapping[str, Any]) -> bool:
    """Return True for a row with a 64-bit `step` and numbers that a float can hold, or nulls."""
    try:
        array("d", [value for value in row.values() if value is not None])
    except (TypeError, OverflowError):
        return False
    step = row.get("step")
    return isinstance(step, int) and abs(step) < 2**63


def drop_torn_tail(path: Path) -> None:
    """Remove an incomplete last line, left by a killed process or a full disk."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open_record(path, "rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            os.fsync(file.fileno())
