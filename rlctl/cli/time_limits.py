"""Time limits of a run and its restarts: `--max-time`, `--save-by` and `--retries`."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import NoReturn

import typer

from rlctl.cli.stderr import notice
from rlctl.errors import UsageError
from rlctl.recipes.durations import HINT, parse_duration
from rlctl.redaction import redact_word


@dataclass(frozen=True)
class Limits:
    """Values of the options in `limit_options`."""

    max_time: str | None
    save_by: str | None
    retries: int

    @property
    def words(self) -> list[str]:
        """The options as words of a command line, also in another time zone."""
        given = {
            "--max-time": self.max_time,
            "--save-by": self.save_by and _moment(self.save_by).isoformat(),
            "--retries": str(self.retries or ""),
        }
        return [word for option, value in given.items() if value for word in (option, value)]

    def end_by(self) -> float | None:
        """Return the earlier of both limits by `time.monotonic`, or None without a limit.

        Later changes of the system's clock do not move it. Raises UsageError for an invalid or past
        time.
        """
        left: list[timedelta] = []
        if self.max_time:
            left.append(_duration(self.max_time))
        if self.save_by:
            left.append(_moment(self.save_by) - datetime.now().astimezone())
        if not left:
            return None
        return time.monotonic() + min(left).total_seconds()

    def supervise(
        self, words: Sequence[str], folder: Path, inline: bool, overrides: Sequence[str]
    ) -> NoReturn:
        """Run `rlctl WORDS` in a child process, resume its run in `folder` after crashes, and exit.

        The exit code is that of the last attempt. Secrets among the `overrides` of WORDS are given
        again to each resume, because the run does not store them.
        """
        from rlctl.runs.stop import supervise

        secrets = [word for word in overrides if word != redact_word(word)]
        end = self.end_by()

        def options() -> list[str]:
            words: list[str] = []
            if inline:
                words.append("--inline")
            if end is not None:
                left = math.ceil(max(1.0, end - time.monotonic()))
                words += ["--max-time", f"{left}s"]
            return words

        again = ["resume", str(folder), *secrets]
        raise typer.Exit(supervise(words, again, options, folder, self.retries, notice))


def _duration(text: str) -> timedelta:
    found = parse_duration(text)
    if found is None:
        raise UsageError(f"{text!r} is not a duration", where="--max-time", hint=HINT)
    return found


def _moment(text: str) -> datetime:
    """Parse a point in time: a time of day is the next such, no time zone means local time."""
    local = datetime.now()
    now = local.astimezone()
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text):
            hours, minutes, seconds, *_ = map(int, f"{text}:0".split(":"))
            # Without an offset until the day is known: it changes with daylight saving time.
            today = local.replace(hour=hours, minute=minutes, second=seconds, microsecond=0)
            if today.astimezone() <= now:
                today += timedelta(days=1)
            return today.astimezone()
        moment = datetime.fromisoformat(text).astimezone()
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not a valid time: {error}",
            where="--save-by",
            hint="write 23:30 or 2026-11-22T06:00",
        ) from error
    if moment <= now:
        raise UsageError(
            f"{text} is in the past: now is {now:%Y-%m-%dT%H:%M:%S%z}", where="--save-by"
        )
    return moment
