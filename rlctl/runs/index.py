"""SQLite cache of run digests, so that a listing of thousands of runs reads only changed files.

The folders are authoritative. One table has the digest of each file as compressed JSON, with the
stamp of the file (inode, size, modification time): the digest is computed again when that differs.
Digests of the same file are much alike, so the first one is the dictionary of their compression.
The index may be deleted at any time and is shared by processes.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from rlctl.monitoring.run_summary import RunSummary
from rlctl.runs.digests import RECORD, SERIES, Part
from rlctl.runs.process import DriverProcess
from rlctl.runs.record import RunRecord
from rlctl.tracking.jsonl import parse_json

INDEX_FILE = ".index.sqlite"
# Begins every stamp, so that digests of another layout are computed again.
_LAYOUT = zlib.crc32(
    repr(
        ["dictionary", *SERIES]
        + [field.name for kind in (RunRecord, DriverProcess, RunSummary) for field in fields(kind)]
    ).encode()
)
_LOCK_TIMEOUT_S = 2.0  # for another process's write; without the index a listing is only slower
_FEW = 100  # up to this number runs are looked up one by one
_LEVEL = 3  # of compression
_DICTIONARY = ""  # in place of a run's name: the row with the dictionary of a file's digests
_TABLE = (
    "CREATE TABLE IF NOT EXISTS digests"
    " (file TEXT, run TEXT, stamp TEXT, value BLOB, UNIQUE (file, run))"
)

T = TypeVar("T")


class Index:
    """Index of the runs under `root`. Stores nothing where its file cannot be written.

    Threads must not use an object at the same time.
    """

    def __init__(self, root: Path) -> None:
        self.file = root / INDEX_FILE
        self._connection: sqlite3.Connection | None = None
        self._memory: dict[str, dict[str, tuple[str, Any]]] = {}  # stamp, digest by file, run

    def read(self, part: Part, folders: Mapping[str, str]) -> dict[str, Any]:
        """Return the digest of `part` for each run in `folders` (id -> folder).

        A missing file has the digest `part.absent`. A `small` file that has not changed since this
        object read it has the same digest object.
        """
        memory = self._memory.setdefault(part.file, {}) if part.small else {}
        digests: dict[str, Any] = {}
        changed: dict[str, str] = {}  # stamps
        for run, folder in folders.items():
            now = stamp(f"{folder}/{part.file}")
            then, digest = memory.get(run, (None, None))
            digests[run] = part.absent if now is None else digest
            if now is not None and then != now:
                changed[run] = now
        stored = self._guard(lambda: self._select(part, changed), {}) if changed else {}
        _, dictionary = stored.get(_DICTIONARY, ("", b""))
        fresh: list[tuple[str, str, Any]] = []
        for run, now in changed.items():
            then, packed = stored.get(run, ("", b""))
            is_usable = then == now or (part.grows and then.startswith(f"{_LAYOUT}-"))
            digest = _unpack(packed, dictionary) if is_usable else None
            if then != now or digest is None:
                path = Path(folders[run], part.file)
                digest = part.digest(path) if digest is None else part.digest(path, digest)
                fresh.append((run, now, digest))
            digests[run] = digest
            if part.small:
                memory[run] = now, digest
        if fresh:
            self._guard(lambda: self._store(part, fresh), None)
        return digests

    def forget_others(self, runs: Mapping[str, Any]) -> None:
        """Remove the digests of runs that no longer exist."""

        def delete() -> None:
            query = "SELECT run FROM digests WHERE file = ?"
            stored = {run for (run,) in self._open().execute(query, (RECORD.file,))}
            if gone := stored - runs.keys() - {_DICTIONARY}:
                with self._open() as connection:
                    query = "DELETE FROM digests WHERE run = ?"
                    connection.executemany(query, [(run,) for run in gone])

        self._guard(delete, None)
        for memory in self._memory.values():
            for run in memory.keys() - runs.keys():
                del memory[run]

    def _select(self, part: Part, runs: Mapping[str, Any]) -> dict[str, tuple[str, bytes]]:
        """Return stamps and packed digests by run, of all runs if `runs` are many.

        The dictionary is among them.
        """
        query = "SELECT run, stamp, value FROM digests WHERE file = ?"
        if len(runs) > _FEW:
            rows = self._open().execute(query, (part.file,))
        else:
            names = (_DICTIONARY, *runs)
            marks = ", ".join("?" * len(names))
            rows = self._open().execute(f"{query} AND run IN ({marks})", (part.file, *names))
        return {run: (then, packed) for run, then, packed in rows}

    def _store(self, part: Part, digests: Sequence[tuple[str, str, Any]]) -> None:
        """Store runs with their stamps and digests; another process may store some as well."""
        first = (part.file, _DICTIONARY, str(_LAYOUT), _json(digests[0][2]))
        query = "SELECT value FROM digests WHERE file = ? AND run = ?"
        with self._open() as connection:
            connection.execute("INSERT OR IGNORE INTO digests VALUES (?, ?, ?, ?)", first)
            (dictionary,) = connection.execute(query, first[:2]).fetchone()
            connection.executemany(
                "INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?)",
                ((part.file, run, now, _pack(digest, dictionary)) for run, now, digest in digests),
            )

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
        status = os.stat(path)
    except OSError:
        return None
    return f"{_LAYOUT}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _connect(file: Path) -> sqlite3.Connection:
    """Open the index; it is readable for users who can write into its folder.

    WAL mode is not used: it does not work on network file systems.
    """
    if file.parent.is_dir():
        writable = file.parent.stat().st_mode & 0o022
        with suppress(OSError):  # it exists, or cannot be written
            os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600 | writable | writable << 1))
    connection = sqlite3.connect(
        file if file.parent.is_dir() else ":memory:",
        timeout=_LOCK_TIMEOUT_S,
        check_same_thread=False,
    )
    connection.execute(_TABLE)
    return connection


def _json(digest: Any) -> bytes:
    """Return the JSON of a digest; values that only YAML has, such as dates, become text.

    orjson would lose infinities.
    """
    return json.dumps(digest, default=str).encode()


def _pack(digest: Any, dictionary: bytes) -> bytes:
    packer = zlib.compressobj(_LEVEL, zdict=dictionary)
    return packer.compress(_json(digest)) + packer.flush()


def _unpack(packed: bytes, dictionary: bytes) -> Any:
    """Return a digest; None if it was packed with another dictionary."""
    try:
        return parse_json(zlib.decompressobj(zdict=dictionary).decompress(packed))
    except (zlib.error, ValueError):
        return None
