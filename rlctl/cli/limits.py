"""`--max-time`, `--save-by` and `--retries`: how long a run may take, and what becomes of it when it crashes."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rlctl.errors import UsageError

MaxTime = Annotated[
    str | None,
    typer.Option(
        "--max-time",
        metavar="TIME",
        help="Save and end, with exit code 0, before it has run so long: 3h50m, 90m or 3:50:00.",
    ),
]
SaveBy = Annotated[
    str | None,
    typer.Option(
        "--save-by",
        metavar="WHEN",
        help="Save and end, with exit code 0, before this time: 23:30 or 2026-11-22T06:00.",
    ),
]
Retries = Annotated[
    int,
    typer.Option(
        "--retries",
        metavar="N",
        min=0,
        help="Start a run that crashes again from its last checkpoint, N times at most.",
    ),
]

_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?")
_CLOCK = re.compile(
    r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)"
)  # as schedulers write it: days-hours:minutes:seconds


@dataclass(frozen=True)
class Limits:
    """What the three options say."""

    max_time: str | None
    save_by: str | None
    retries: int

    @property
    def words(self) -> list[str]:
        """The options again, for a command line."""
        given = {
            "--max-time": self.max_time,
            "--save-by": self.save_by,
            "--retries": str(self.retries or ""),
        }
        return [word for option, value in given.items() if value for word in (option, value)]

    def end_by(self) -> float | None:
        """The earlier of both times as seconds since the epoch, or None. Raises UsageError for what is no time, or is past."""
        ends = [time.time() + _duration(self.max_time).total_seconds()] if self.max_time else []
        if self.save_by:
            ends.append(_moment(self.save_by).timestamp())
        return min(ends, default=None)

    def supervise(self, words: Sequence[str], folder: Path, inline: bool) -> NoReturn:
        """Run `rlctl WORDS`, whose run is in `folder`, in a process of its own, and again when it crashes; leave with its exit code."""
        from rlctl.cli.console import notice
        from rlctl.runs.supervise import supervise

        end = self.end_by()
        common = [
            *(["--inline"] if inline else []),
            *(["--save-by", datetime.fromtimestamp(end).isoformat()] if end else []),
        ]
        raise typer.Exit(
            supervise(
                [*words, *common], ["resume", str(folder), *common], folder, self.retries, notice
            )
        )


def _duration(text: str) -> timedelta:
    match = _CLOCK.fullmatch(text) or _UNITS.fullmatch(text)
    found = timedelta()
    if match:
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        found = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if not found:
        raise UsageError(
            f"{text!r} is no time to run",
            where="--max-time",
            hint="such as 3h50m, 90m, 45s, 3:50:00 or 1-12:00:00",
        )
    return found


def _moment(text: str) -> datetime:
    """A time of the day is the next one; without a zone it is local."""
    now = datetime.now().astimezone()
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text):
            hours, minutes, *seconds = map(int, text.split(":"))
            moment = now.replace(
                hour=hours, minute=minutes, second=seconds[0] if seconds else 0, microsecond=0
            )
            return moment if moment > now else moment + timedelta(days=1)
        moment = datetime.fromisoformat(text).astimezone()
    except ValueError as error:
        raise UsageError(
            f"{text!r} is no time: {error}",
            where="--save-by",
            hint="such as 23:30 or 2026-11-22T06:00",
        ) from error
    if moment <= now:
        raise UsageError(f"{text} is past: it is {now:%Y-%m-%dT%H:%M:%S%z}", where="--save-by")
    return moment
