"""The logs of a run: what its worker processes printed, one file a process, in the folder of each attempt."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import NotFoundError
from rlctl.runs.follow import POLL_S, Tail, reread
from rlctl.runs.store import ACTIVE, Run

_NAME = re.compile(r"(?P<pool>.+)-(?P<rank>\d+)\.log")


def log_files(run: Run, attempt: int | None, role: str | None, rank: int | None) -> list[Path]:
    """The logs of an attempt (the newest where None), of a pool or the pool of a role, of one rank; sorted by pool and rank.

    Errors: NotFoundError for an attempt, a role or a rank that has none, naming those that there are.
    """
    folder = run.path / "attempts" / (str(attempt) if attempt is not None else "latest")
    if not folder.is_dir():
        known = sorted((each.name for each in folder.parent.glob("[0-9]*")), key=int)
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
    pools = sorted({pool for pool, _, _ in found})
    if role is not None:
        wanted = role if role in pools else _placement(run).get(role)
        if wanted not in pools:
            roles = [name for name, pool in _placement(run).items() if pool in pools]
            raise NotFoundError(
                f"no process of role {role!r} has a log",
                where=str(folder),
                hint=f"there are: {', '.join([*roles, *pools])}",
            )
        found = [each for each in found if each[0] == wanted]
    chosen = [path for _, number, path in found if rank in (None, number)]
    if not chosen:
        ranks = ", ".join(str(number) for _, number, _ in found)
        raise NotFoundError(
            f"no process of rank {rank} has a log", where=str(folder), hint=f"there are: {ranks}"
        )
    return chosen


def _placement(run: Run) -> dict[str, str]:
    """The pool of each role, as the run was configured."""
    try:
        config: Any = yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8"))
        placement = config["trainer"]["placement"]
        return {role: pool for role, pool in placement.items() if isinstance(pool, str)}
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError):
        return {}


def lines_of(files: Sequence[Path], last: int | None) -> Iterator[tuple[str, str]]:
    """Name of the process and line, file after file; of each only its `last` lines, if given."""
    for path in files:
        lines: Iterator[str] | deque[str] = Tail(path).lines(last=True)
        yield from (
            (path.stem, line) for line in (lines if last is None else deque(lines, maxlen=last))
        )


def tail_of(logs: Sequence[Path], num_lines: int = 15) -> str:
    """The last lines of each log, behind its name."""
    parts: list[str] = []
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()[-num_lines:] if log.is_file() else []
        parts.append(f"{log}" + "".join(f"\n    {line}" for line in lines))
    return "\n".join(parts)


def follow(run: Run, files: Sequence[Path], last: int | None) -> Iterator[tuple[str, str]]:
    """As `lines_of`, and then what is added, until the run ends or goes on in another attempt."""
    tails = [Tail(path) for path in files]
    for tail in tails:
        lines = list(tail.lines())
        yield from (
            (tail.path.stem, line)
            for line in (lines if last is None else lines[-last:] if last else [])
        )
    while True:
        ended = not _goes_on(run)  # asked before reading: what was written until then is read
        for tail in tails:
            yield from ((tail.path.stem, line) for line in tail.lines(last=ended))
        if ended:
            return
        time.sleep(POLL_S)


def _goes_on(run: Run) -> bool:
    """Whether the attempt that `run` knows still runs."""
    now = reread(run)
    same = now.record is None or run.record is None or now.record.attempts == run.record.attempts
    return now.state in ACTIVE and same
