"""Logs of a run: the output of its worker processes, one file per process and attempt."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rlctl.errors import NotFoundError
from rlctl.files import open_record
from rlctl.runs.run import ACTIVE, Run, read_run
from rlctl.runs.settings import read_settings

POLL_S = 0.25
CHUNK = 1 << 20  # bytes read at once


def reread(run: Run) -> Run:
    """Return the run in its present state."""
    return read_run(run.path)


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
        with open_record(self.path) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.inode or status.st_size < self.position:  # it was replaced
                self.inode = status.st_ino
                self.position = 0
                self.rest = b""
            file.seek(self.position)
            while chunk := file.read(CHUNK):
                self.position += len(chunk)
                *complete, self.rest = (self.rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in complete)
        if last and self.rest:
            yield self.rest.decode(errors="replace")
            self.rest = b""


_NAME = re.compile(r"(?P<pool>.+)-(?P<rank>\d+)\.log")


def log_files(run: Run, attempt: int | None, role: str | None, rank: int | None) -> list[Path]:
    """Return the logs of an attempt (None: the newest), sorted by pool and rank.

    `role` selects one pool, by its name or that of a role in it, `rank` one rank. Raises
    NotFoundError, naming what exists, for an attempt, role or rank without a log.
    """
    folder = run.path / "attempts" / "latest"
    if attempt is not None:
        folder = folder.with_name(str(attempt))
    found = _all_logs(run, folder, attempt)
    if role is not None:
        pool = _pool_of(run, role, {pool for pool, _, _ in found}, folder)
        found = [item for item in found if item[0] == pool]
    chosen = [path for _, number, path in found if rank in (None, number)]
    if not chosen:
        ranks = ", ".join(str(number) for _, number, _ in found)
        raise NotFoundError(
            f"no process of rank {rank} has a log", where=str(folder), hint=f"there are: {ranks}"
        )
    return chosen


def _all_logs(run: Run, folder: Path, attempt: int | None) -> list[tuple[str, int, Path]]:
    """Return (pool, rank, path) of every log in the folder of an attempt, sorted."""
    if not folder.is_dir() or not folder.resolve().is_relative_to(run.path.resolve()):
        known = sorted((path.name for path in folder.parent.glob("[0-9]*")), key=int)
        raise NotFoundError(
            f"this run has no attempt {attempt}",
            where=str(run.path),
            hint=f"there are: {', '.join(known) or 'none'}",
        )
    found = sorted(
        (match["pool"], int(match["rank"]), path)
        for path in folder.glob("*.log")
        if (match := _NAME.fullmatch(path.name))
    )
    if not found:
        raise NotFoundError(
            "no process of this attempt has a log",
            where=str(folder),
            hint="workers of --inline print to the terminal that started the run",
        )
    return found


def _pool_of(run: Run, role: str, pools: set[str], folder: Path) -> str:
    """Return the pool named `role` or that hosts the role."""
    placement = _placement(run)
    if role in pools:
        return role
    pool = placement.get(role)
    if pool not in pools:
        roles = [name for name, hosting in placement.items() if hosting in pools]
        raise NotFoundError(
            f"no process of role {role!r} has a log",
            where=str(folder),
            hint=f"there are: {', '.join([*roles, *sorted(pools)])}",
        )
    return pool


def _placement(run: Run) -> dict[str, str]:
    """Return the pool of each role in the run's config."""
    section = "trainer.placement."
    return {
        key.removeprefix(section): pool
        for key, pool in read_settings(run.path).items()
        if key.startswith(section) and isinstance(pool, str)
    }


def lines_of(files: Sequence[Path], last: int | None) -> Iterator[tuple[str, str]]:
    """Yield process name and line, file by file; only the `last` lines of each, if given."""
    for path in files:
        lines = Tail(path).lines(last=True)
        yield from ((path.stem, line) for line in _last(lines, last))


def _last(lines: Iterator[str], number: int | None) -> Iterable[str]:
    if number is None:
        return lines
    return deque(lines, maxlen=number)


def format_tails(logs: Sequence[Path], num_lines: int = 15) -> str:
    """Return the path and last lines of each log."""
    parts: list[str] = []
    for log in logs:
        lines: list[str] = []
        if log.is_file():
            lines = log.read_text(errors="replace", encoding="utf-8").splitlines()[-num_lines:]
        parts.append(f"{log}" + "".join(f"\n    {line}" for line in lines))
    return "\n".join(parts)


def follow(run: Run, files: Sequence[Path], last: int | None) -> Iterator[tuple[str, str]]:
    """Yield as `lines_of`, then new lines until the attempt ends."""
    tails = [Tail(path) for path in files]
    for tail in tails:
        yield from ((tail.path.stem, line) for line in _last(tail.lines(), last))
    while True:
        ended = not _is_active(run)  # before reading, so that nothing written until the end is lost
        for tail in tails:
            yield from ((tail.path.stem, line) for line in tail.lines(last=ended))
        if ended:
            return
        time.sleep(POLL_S)


def _is_active(run: Run) -> bool:
    """Return True while the attempt recorded in `run` is active."""
    now = reread(run)
    same = now.record is None or run.record is None or now.record.attempts == run.record.attempts
    return now.state in ACTIVE and same
