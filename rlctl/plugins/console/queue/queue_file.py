"""Entries of the queue of this machine: one SQLite file, which only transactions change.

The file is read and written by commands, by the queue's process, and by the process of an entry,
which claims its entry before it becomes `rlctl`. So each entry is claimed once, whoever starts
it and whoever is killed.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlctl.errors import ConflictError, NotFoundError, ResourceError
from rlctl.process import DriverProcess
from rlctl.redaction import is_secret_name, redact
from rlctl.runs.ownership import state_folder
from rlctl.runs.record import now

VARIABLE = "RLCTL_QUEUE"  # another folder of the queue
_OPEN = ("waiting", "running")
_BUSY_S = 60.0
_TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, state TEXT, priority INTEGER, place INTEGER, body TEXT);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT);
"""


@dataclass(frozen=True)
class Order:
    """Command of an entry: `words` of rlctl, and those that continue its run (`again`).

    `folder` is that of the run or sweep, `kind` that of its devices: `GPU` or `core`. It needs
    `number` of `devices`, all of them if None; without `devices`, of those of the machine. With
    `now` it does not wait for them. `environment` is that of the shell, without secrets.
    """

    name: str
    words: Sequence[str]
    again: Sequence[str]
    folder: str
    cwd: str
    python: str
    environment: Mapping[str, str]
    kind: str
    number: int | None = None
    devices: Sequence[str] | None = None
    now: bool = False


@dataclass(frozen=True)
class Entry:
    """Entry: its order, its state (waiting, running, finished, failed or stopped), its process.

    `used` are the devices that it got, `restarts` counts those after the machine went down.
    """

    order: Order
    id: int = 0
    state: str = "waiting"
    priority: int = 0
    added: str = field(default_factory=now)
    began: str | None = None
    ended: str | None = None
    process: DriverProcess | None = None
    used: Sequence[str] = ()
    restarts: int = 0
    exit_code: int | None = None
    reason: str = ""


class Queue:
    """Queue of a user on this machine, in `folder`. Raises ResourceError if it cannot be used."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or queue_folder()
        self.file = self.folder / "queue.db"
        self.logs = self.folder / "logs"
        try:
            self.logs.mkdir(0o700, parents=True, exist_ok=True)
            status = self.folder.stat()
        except OSError as error:
            raise _unusable(self.folder, error) from error
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise _unusable(self.folder, "other users can write to it")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection whose changes are kept together, and only if the block succeeds."""
        before = os.umask(0o077)
        try:
            connection = sqlite3.connect(self.file, timeout=_BUSY_S, isolation_level=None)
            try:
                connection.executescript(_TABLES)
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise _unusable(self.file, error) from error
        finally:
            os.umask(before)

    def entries(self, *states: str) -> list[Entry]:
        """Return the entries in these states, or all: in the order in which they start."""
        with self.transaction() as connection:
            return _read(connection, states)

    def add(self, order: Order, priority: int = 0) -> Entry:
        """Add an entry. Raises ConflictError if another one makes a run in the same folder."""
        with self.transaction() as connection:
            same = [e.id for e in _read(connection, _OPEN) if e.order.folder == order.folder]
            if same:
                raise ConflictError(f"entry {same[0]} of the queue is for the run {order.name}")
            entry = Entry(order, priority=priority)
            added = connection.execute(
                "INSERT INTO entries (state, priority, place, body) SELECT 'waiting', ?, "
                "COALESCE(MAX(place), 0) + 1, ? FROM entries",
                (priority, _body(entry)),
            )
            return replace(entry, id=int(added.lastrowid or 0))

    def change(self, number: int, before: Sequence[str], **fields: Any) -> Entry | None:
        """Change an entry that is in one of the states `before`; return it, or None if not."""
        with self.transaction() as connection:
            found = [entry for entry in _read(connection, before) if entry.id == number]
            for entry in found:
                entry = replace(entry, **fields)
                connection.execute(
                    "UPDATE entries SET state = ?, body = ? WHERE id = ?",
                    (entry.state, _body(entry), number),
                )
                return entry
        return None

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove entries; raise ConflictError if one is running, NotFoundError without one."""
        with self.transaction() as connection:
            for number in numbers:
                entry = _find(connection, number)
                if entry.state == "running":
                    hint = f"rlctl stop {entry.order.name}"
                    raise ConflictError(f"entry {number} is running", hint=hint)
                connection.execute("DELETE FROM entries WHERE id = ?", (number,))

    def move(self, number: int, place: int) -> Entry:
        """Make an entry the one at `place`, from 1, of those that wait.

        Its priority becomes that of its neighbour where the order needs it.
        """
        with self.transaction() as connection:
            entry = _find(connection, number)
            if entry.state != "waiting":
                raise ConflictError(f"entry {number} is {entry.state}: only waiting ones move")
            others = [e for e in _read(connection, ["waiting"]) if e.id != number]
            index = min(place, len(others) + 1) - 1
            priority = max([entry.priority, *(e.priority for e in others[index : index + 1])])
            priority = min([priority, *(e.priority for e in others[:index][-1:])])
            others.insert(index, replace(entry, priority=priority))
            for new_place, other in enumerate(others, 1):
                connection.execute(
                    "UPDATE entries SET place = ?, priority = ? WHERE id = ?",
                    (new_place, other.priority, other.id),
                )
            return others[index]

    @property
    def paused(self) -> bool:
        """True while no entry is to start."""
        with self.transaction() as connection:
            return bool(connection.execute("SELECT 1 FROM settings WHERE name='paused'").fetchone())

    def pause(self, paused: bool) -> None:
        """Start no entries until the next call with False."""
        change = "DELETE FROM settings WHERE name='paused'"
        if paused:
            change = "INSERT OR REPLACE INTO settings VALUES ('paused', '1')"
        with self.transaction() as connection:
            connection.execute(change)

    def log(self, entry: Entry) -> Path:
        """Return the file with the output of an entry."""
        return self.logs / f"{entry.id}.log"


def queue_folder() -> Path:
    """Return the folder of the queue of this user and host, or that of RLCTL_QUEUE."""
    if given := os.environ.get(VARIABLE):
        return Path(given).absolute()
    return state_folder() / f"queue-{socket.gethostname()}"


def others(folder: Path) -> dict[Path, int]:
    """Return the folders of other hosts' queues, with the number of entries that wait there."""
    found: dict[Path, int] = {}
    for file in folder.parent.glob("queue-*/queue.db"):
        if file.parent != folder and (waiting := Queue(file.parent).entries("waiting")):
            found[file.parent] = len(waiting)
    return found


def secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be secrets: they are in no file of the queue."""
    return {
        name: value
        for name, value in environment.items()
        if is_secret_name(name) or redact(value) != value
    }


def _read(connection: sqlite3.Connection, states: Sequence[str]) -> list[Entry]:
    rows = connection.execute(
        "SELECT id, state, priority, body FROM entries ORDER BY priority DESC, place, id"
    )
    return [_entry(*row) for row in rows if not states or row[1] in states]


def _find(connection: sqlite3.Connection, number: int) -> Entry:
    for entry in _read(connection, ()):
        if entry.id == number:
            return entry
    raise NotFoundError(f"the queue has no entry {number}", hint="rlctl queue ls --all")


def _entry(number: int, state: str, priority: int, body: str) -> Entry:
    fields: dict[str, Any] = json.loads(body)
    process = fields["process"] and DriverProcess.from_dict(fields["process"])
    columns = {"id": number, "state": state, "priority": priority, "process": process}
    return Entry(**{**fields, **columns, "order": Order(**fields["order"])})


def _body(entry: Entry) -> str:
    return json.dumps(asdict(entry))


def _unusable(path: Path, why: object) -> ResourceError:
    hint = f"free space, or set {VARIABLE} to another folder"
    return ResourceError(f"the queue cannot be used: {why}", where=str(path), hint=hint)
