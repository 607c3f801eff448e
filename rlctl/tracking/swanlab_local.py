"""Experiments of SwanLab's local dashboard: one visible experiment per run, and their states.

The dashboard's database is changed directly, because SwanLab has no call for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

_DATABASE = "runs.swanlab"
_RUNNING = 0
_CRASHED = -1
_TIMEOUT_S = 10.0


def rename_attempt(folder: Path, run_id: str, name: str) -> None:
    """Name the experiments of earlier attempts `NAME (attempt N)`, so that `name` is free.

    Earlier versions left the first one under `name`, and called the last one `NAME-2`. One that is
    still running because its process was killed is closed. `run_id` is SwanLab's, and `folder` the
    one that `swanlab watch` shows.
    """
    with _connected(folder) as database:
        taken = {row[0] for row in database.execute("SELECT name FROM experiment")}
        free = (f"{name} (attempt {number})" for number in count(1))
        unused = (text for text in free if text not in taken)
        query = "SELECT run_id, name FROM experiment WHERE name = ? OR run_id LIKE ? ORDER BY rowid"
        for folder_name, old in database.execute(query, (name, f"%-{run_id}")).fetchall():
            if not old.startswith(f"{name} (attempt "):
                change = "UPDATE experiment SET name = ? WHERE run_id = ?"
                database.execute(change, (next(unused), folder_name))
    close(folder, [run_id])


def hide(folder: Path, run_id: str) -> None:
    """Hide an experiment in the charts of the project; its row in the table remains."""
    with _connected(folder) as database:
        database.execute('UPDATE experiment SET "show" = 0 WHERE run_id LIKE ?', (f"%-{run_id}",))


def close(folder: Path, ids: Sequence[str]) -> None:
    """Mark experiments that are still running as crashed."""
    change = "UPDATE experiment SET status = ?, finish_time = ? WHERE status = ? AND run_id LIKE ?"
    now = datetime.now(UTC).isoformat()
    with _connected(folder) as database:
        for run_id in ids:
            database.execute(change, (_CRASHED, now, _RUNNING, f"%-{run_id}"))


@contextmanager
def _connected(folder: Path) -> Iterator[sqlite3.Connection]:
    """Yield a transaction of the dashboard's database; an empty one if there is no database."""
    file = folder / _DATABASE
    place = file if file.exists() else ":memory:"
    with closing(sqlite3.connect(place, timeout=_TIMEOUT_S)) as database, database:
        if place != file:
            database.execute('CREATE TABLE experiment (name, run_id, status, finish_time, "show")')
        yield database
