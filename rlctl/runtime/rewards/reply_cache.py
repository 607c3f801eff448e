"""Replies to requests on disk, by a hash of all that determines them.

SQLite makes a write atomic and lets several processes, also of different runs, share a file. An
entry has the reply only: no request, no prompt and no key of an API.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)

_BUSY_S = 10.0  # wait for another process


class ReplyCache:
    """Map of requests to replies in the file `path`; a file that fails is a warning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, _BUSY_S, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")  # readers do not wait for a writer
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS replies (hash TEXT PRIMARY KEY, reply)")
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    @staticmethod
    def key(request: Any) -> str:
        """Return the hash of a request in JSON's types."""
        text = json.dumps(request, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def get(self, key: str) -> Any:
        """Return a reply, or None if there is none."""
        if self._file is None:
            return None
        try:
            row = self._file.execute("SELECT reply FROM replies WHERE hash = ?", (key,)).fetchone()
            return None if row is None else json.loads(row[0])
        except (sqlite3.Error, ValueError) as error:
            self._give_up(error)
            return None

    def put(self, key: str, reply: Any) -> None:
        """Keep a reply, in JSON's types."""
        if self._file is None:
            return
        try:
            values = (key, json.dumps(reply))
            self._file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", values)
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        LOG.warning("the cache of replies %s is not used: %s", self.path, error)
        self._file = None
