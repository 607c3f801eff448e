"""SQLite cache of run digests, so that a listing of thousands of runs reads only changed files.

The folders are authoritative. The index stores each digest with the file's stamp (inode, size,
modification time) and recomputes it when the stamp differs. Digests are compressed JSON; those of
the same file are much alike, so that the first one serves as the dictionary of the others. The
index may be deleted at any time and is shared by processes.
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
from rlctl.runs.digests import PARTS, SERIES, Part
from rlctl.runs.process import DriverProcess
from rlctl.runs.record import RunRecord
from rlctl.tracking.jsonl import parse_json

INDEX_FILE = ".index.sqlite"
# Version of the digests' layout: an index with another version is emptied.
_LAYOUT = ("compressed", *SERIES, "curves", "position", "inode", "mark")
_VERSION = (
    zlib.crc32(
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
_PAGE_BYTES = 16384  # for digests of about 3 kB; the default of 4096 would waste much of a page
_LEVEL = 3  # of compression

Key = tuple[str, ...]
Kept = dict[str, tuple[str, bytes]]  # run -> stamp, compressed digest
Fresh = tuple[str, str, Any]  # run, stamp, digest
T = TypeVar("T")


class Index:
    """Index of the runs under `root`. Stores nothing where its file cannot be written.

    New digests are stored at once, or with `save_later` by `save`, since storing them takes longer
    than reading the files. Threads must not use an object at the same time.
    """

    def __init__(self, root: Path, save_later: bool = False) -> None:
        self.file = root / INDEX_FILE
        self.save_later = save_later
        self._connection: sqlite3.Connection | None = None
        self._memory: dict[str, dict[str, tuple[str, Any]]] = {}  # stamp, digest by file, run
        self._unsaved: list[tuple[Part, list[Fresh]]] = []

    def read(
        self, part: Part, folders: Mapping[str, str], keys: Sequence[Key] | None = None
    ) -> dict[str, Any]:
        """Return the digest of `part` for each run in `folders` (id -> folder).

        A missing file has the digest `part.absent`. With `keys` (paths into the digest) return the
        list of values at these paths instead, null where absent. A file that has not changed since
        this object read it has the same digest object.
        """
        memory = self._memory.setdefault(part.file, {}) if part.small else {}
        found: dict[str, Any] = {}
        changed: dict[str, tuple[str, str]] = {}  # stamp, folder
        for run, folder in folders.items():
            now = stamp(f"{folder}/{part.file}")
            then, digest = memory.get(run, (None, None))
            found[run] = part.absent if now is None else digest
            if now is not None and then != now:
                changed[run] = now, folder
        if changed:
            read = self._read_changed(part, changed)
            found |= read
            if part.small:
                memory |= {run: (now, read[run]) for run, (now, _) in changed.items()}
        if keys is None:
            return found
        return {run: [_at(digest, key) for key in keys] for run, digest in found.items()}

    def _read_changed(self, part: Part, changed: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        """Return the stored or new digests of runs with a stamp and a folder each."""
        dictionary, kept = self._guard(lambda: self._select(part, changed), (b"", {}))
        found: dict[str, Any] = {}
        fresh: list[Fresh] = []
        for run, (now, folder) in changed.items():
            then, packed = kept.get(run, (None, b""))
            unpacked = _unpack(packed, dictionary) if then == now or part.grows else None
            if then != now or unpacked is None:
                unpacked = _digest(part, Path(folder, part.file), unpacked)
                fresh.append((run, now, unpacked))
            found[run] = unpacked
        if fresh:
            self._unsaved.append((part, fresh))
            if not self.save_later:
                self.save()
        return found

    def save(self) -> None:
        """Store the digests that are not stored yet."""
        for part, fresh in self._unsaved:
            self._guard(lambda part=part, fresh=fresh: self._keep(part, fresh), None)
        self._unsaved.clear()

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
        for memory in self._memory.values():
            for run in memory.keys() - runs.keys():
                del memory[run]

    def clear(self) -> None:
        """Remove all digests."""

        def empty(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("DELETE FROM digests")
                connection.execute("DELETE FROM dictionaries")

        self._memory.clear()
        self._unsaved.clear()
        self._guard(lambda: empty(self._open()), None)

    def _select(self, part: Part, runs: Mapping[str, Any]) -> tuple[bytes, Kept]:
        """Return the dictionary of `part` and the stored digests, of all runs if `runs` are many.

        Another process may clear the index between the two queries: the digests then fail to
        unpack with this dictionary, and are computed.
        """
        connection = self._open()
        dictionary = _dictionary(connection, part)
        query = "SELECT run, stamp, value FROM digests WHERE file = ?"
        if len(runs) > _FEW:
            rows = connection.execute(query, (part.file,)).fetchall()
        else:
            rows = [
                row
                for run in runs
                for row in connection.execute(f"{query} AND run = ?", (part.file, run))
            ]
        return dictionary, {run: (kept, packed) for run, kept, packed in rows}

    def _keep(self, part: Part, rows: Sequence[Fresh]) -> None:
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "INSERT OR IGNORE INTO dictionaries VALUES (?, ?)", (part.file, _json(rows[0][2]))
            )
            dictionary = _dictionary(connection, part)
            connection.executemany(
                "INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?)",
                (
                    (part.file, run, now, _pack(_json(digest), dictionary))
                    for run, now, digest in rows
                ),
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
        found = os.stat(path)
    except OSError:
        return None
    return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"


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
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != _VERSION:
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DROP TABLE IF EXISTS digests")
            connection.execute("DROP TABLE IF EXISTS dictionaries")
            connection.execute(
                "CREATE TABLE digests (file TEXT, run TEXT, stamp TEXT, value BLOB,"
                " UNIQUE (file, run))"
            )
            connection.execute("CREATE TABLE dictionaries (file TEXT PRIMARY KEY, value BLOB)")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
    return connection


def _dictionary(connection: sqlite3.Connection, part: Part) -> bytes:
    row = connection.execute(
        "SELECT value FROM dictionaries WHERE file = ?", (part.file,)
    ).fetchone()
    return row[0] if row else b""


def _pack(text: bytes, dictionary: bytes) -> bytes:
    packer = zlib.compressobj(_LEVEL, zdict=dictionary)
    return packer.compress(text) + packer.flush()


def _unpack(packed: bytes, dictionary: bytes) -> Any:
    """Return a digest; None for none, or one that was packed with another dictionary."""
    try:
        return parse_json(zlib.decompressobj(zdict=dictionary).decompress(packed))
    except zlib.error:
        return None


def _digest(part: Part, path: Path, earlier: Any) -> Any:
    return part.digest(path) if earlier is None else part.digest(path, earlier)


def _json(digest: Any) -> bytes:
    """Encode a digest; values that only YAML has, such as dates, become text.

    orjson would lose infinities.
    """
    return json.dumps(digest, default=str).encode()


def _at(digest: Any, key: Key) -> Any:
    for name in key:
        digest = digest.get(name) if isinstance(digest, dict) else None
    return digest
