"""SQLite cache of run digests, so that a listing of thousands of runs reads only changed files.

The folders are authoritative. The index stores each digest with the file's stamp (inode, size,
modification time) and recomputes it when the stamp differs. The index may be deleted at any time
and is shared by processes.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from rlctl.monitoring.run_summary import RunSummary
from rlctl.runs.digests import PARTS, Part
from rlctl.runs.process import DriverProcess
from rlctl.runs.record import RunRecord

INDEX_FILE = ".index.sqlite"
# Version of the digests' layout: an index with another version is emptied.
_LAYOUT = ("summary", "series")
_VERSION = (
    crc32(
        repr(
            [
                *_LAYOUT,
                *(
                    field.name
                    for kind in (RunRecord, DriverProcess, RunSummary)
                    for field in fields(kind)
                ),
            ]
        ).encode()
    )
    & 0x7FFFFFFF
)
_LOCK_TIMEOUT_S = 2.0  # for another process's write; without the index a listing is only slower
_FEW = 100  # up to this number runs are looked up one by one

Key = tuple[str, ...]
T = TypeVar("T")


class Index:
    """Index of the runs under `root`. Caches nothing where its file cannot be written."""

    def __init__(self, root: Path) -> None:
        self.file = root / INDEX_FILE
        self._connection: sqlite3.Connection | None = None

    def read(
        self, part: Part, folders: Mapping[str, str], keys: Sequence[Key] | None = None
    ) -> dict[str, Any]:
        """Return the digest of `part` for each run in `folders` (id -> folder).

        A missing file has the digest `part.absent`. With `keys` (paths into the digest) return the
        list of values at these paths instead, null where absent: only these are decoded.
        """
        stamps = {run: stamp(f"{folder}/{part.file}") for run, folder in folders.items()}
        kept = self._guard(lambda: self._select(part, stamps, keys), {})
        same = [
            run
            for run, now in stamps.items()
            if now is not None and kept.get(run, (None, ""))[0] == now
        ]
        # Decoding one large document is faster than decoding thousands of small ones.
        found: dict[str, Any] = dict(
            zip(same, json.loads(f"[{','.join(kept[run][1] for run in same)}]"), strict=True)
        )
        if keys is not None:
            found = {run: values[: len(keys)] for run, values in found.items()}
        fresh: list[tuple[str, str, str, str]] = []
        for run, now in stamps.items():
            if now is None:
                found[run] = _pick(part.absent, keys)
            elif run not in found:
                digest = part.digest(Path(folders[run], part.file))
                fresh.append(
                    (part.file, run, now, json.dumps(digest, ensure_ascii=False, default=str))
                )
                found[run] = _pick(digest, keys)
        if fresh:
            self._guard(lambda: self._keep(fresh), None)
        return found

    def forget_others(self, runs: Mapping[str, Any]) -> None:
        """Remove the digests of runs that no longer exist."""

        def drop(connection: sqlite3.Connection) -> None:
            known = {
                run
                for (run,) in connection.execute(
                    "SELECT DISTINCT run FROM digests WHERE file = ?", (PARTS[0].file,)
                )
            }
            if gone := known - runs.keys():
                with connection:
                    connection.executemany(
                        "DELETE FROM digests WHERE run = ?", [(run,) for run in gone]
                    )

        self._guard(lambda: drop(self._open()), None)

    def clear(self) -> None:
        """Remove all digests."""

        def empty(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute("DELETE FROM digests")

        self._guard(lambda: empty(self._open()), None)

    def _select(
        self, part: Part, stamps: Mapping[str, str | None], keys: Sequence[Key] | None
    ) -> dict[str, tuple[str, str]]:
        paths = [_json_path(key) for key in keys or ()]
        # SQLite returns a JSON array for two or more paths but a bare value for one: the first path
        # is repeated.
        value = f"json_extract(value, {', '.join('?' * (len(paths) + 1))})" if paths else "value"
        query = f"SELECT run, stamp, {value} FROM digests WHERE file = ?"
        given = [*paths, paths[0], part.file] if paths else [part.file]
        if len(stamps) > _FEW:
            rows = self._open().execute(query, given).fetchall()
        else:
            rows = [
                row
                for run in stamps
                for row in self._open().execute(f"{query} AND run = ?", [*given, run])
            ]
        return {run: (kept, text) for run, kept, text in rows}

    def _keep(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        with self._open() as connection:
            connection.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?)", rows)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _connect(self.file)
        return self._connection

    def _guard(self, use: Callable[[], T], otherwise: T) -> T:
        """Return `use()`; recreate a damaged index, and return `otherwise` for an unusable one."""
        for _ in range(2):
            try:
                return use()
            except sqlite3.OperationalError:
                return otherwise
            except sqlite3.DatabaseError:
                self._connection = None
                with suppress(OSError):
                    self.file.unlink()
        return otherwise


def stamp(path: str) -> str | None:
    """Return a string that changes whenever the file does; None for a missing file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"


def _connect(file: Path) -> sqlite3.Connection:
    """Open the index. WAL mode is not used: it does not work on network file systems."""
    connection = sqlite3.connect(
        file if file.parent.is_dir() else ":memory:", timeout=_LOCK_TIMEOUT_S
    )
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != _VERSION:
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DROP TABLE IF EXISTS digests")
            connection.execute(
                "CREATE TABLE digests (file TEXT, run TEXT, stamp TEXT, value TEXT,"
                " PRIMARY KEY (file, run)) WITHOUT ROWID"
            )
            connection.execute(f"PRAGMA user_version = {_VERSION}")
    return connection


def _json_path(key: Key) -> str:
    return "$" + "".join(f'."{name}"' for name in key)


def _pick(digest: Any, keys: Sequence[Key] | None) -> Any:
    return digest if keys is None else [_at(digest, key) for key in keys]


def _at(digest: Any, key: Key) -> Any:
    for name in key:
        digest = digest.get(name) if isinstance(digest, dict) else None
    return digest
