"""Place of a run, which tells a run from a copy of its folder, and the user's list of own runs.

The list is in the user's state folder, not in the runs: what a run's folder says about itself comes
with a copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlctl.files import write_text
from rlctl.process import LOCK_FILE


@dataclass(frozen=True)
class Place:
    """A run's id, and the host, the absolute folder and the mark of its folder.

    The mark is made of inode numbers and of the time of a change that no copy keeps. A moved
    folder has the same mark, and so has the folder as seen from another host of a shared disk.
    """

    run: str
    host: str
    folder: str
    mark: str | None

    @classmethod
    def of(cls, run_id: str, path: Path, home: Path | None = None) -> Place:
        """Return the place of the run in `path`, which is or will be called `home`."""
        return cls(run_id, socket.gethostname(), str((home or path).resolve()), _mark(path))

    def matches(self, stored: Mapping[str, Any]) -> bool:
        """Return True if `stored`, made by `to_dict`, is of this run, not of a copy.

        Two of host, folder and mark must be the same.
        """
        if stored.get("run") != self.run:
            return False
        is_same = [stored.get(name) == getattr(self, name) for name in ("host", "folder")]
        is_same.append(self.mark is not None and stored.get("mark") == self.mark)
        return sum(is_same) >= 2

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


def register(place: Place, digest: str, cwd: str) -> None:
    """Note that this user made or confirmed the run, with the SHA-256 of its configuration.

    `cwd` is the folder in which it was started. Does nothing if there is no folder for it.
    """
    with suppress(OSError, RuntimeError):  # a home that is missing or cannot be written
        folder = state_folder() / "runs"
        folder.mkdir(0o700, parents=True, exist_ok=True)
        where = hashlib.sha256(place.folder.encode()).hexdigest()[:8]
        noted = place.to_dict() | {"config": digest, "cwd": cwd}
        write_text(folder / f"{place.run}-{where}.json", json.dumps(noted))


def own_folder(place: Place, digest: str | None = None) -> str | None:
    """Return the folder in which this user started the run at `place`, None for another's run.

    It is another's, too, if the SHA-256 of its configuration is not `digest`, where that is given.
    """
    for noted in _noted(place.run):
        if place.matches(noted) and digest in (None, noted.get("config")):
            return str(noted.get("cwd"))
    return None


def is_copy(place: Place) -> bool:
    """Return True if this user started the run elsewhere, and its folder is still there."""
    noted = list(_noted(place.run))
    if any(place.matches(each) for each in noted):
        return False
    folders = {str(each.get("folder")) for each in noted} - {place.folder}
    return any(Path(folder, LOCK_FILE).exists() for folder in folders)


def _noted(run: str) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of a run; none from a list that another user can write."""
    if not run.isalnum():
        return
    with suppress(OSError, RuntimeError):
        folder = state_folder() / "runs"
        status = folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return
        for file in folder.glob(f"{run}-*.json"):
            with suppress(OSError, ValueError):
                entry = json.loads(file.read_bytes())
                if isinstance(entry, dict):
                    yield entry


def state_folder() -> Path:
    """Return the folder of rlctl's files about this user and machine; it need not exist."""
    root = os.environ.get("XDG_STATE_HOME")
    return (Path(root) if root else Path.home() / ".local" / "state") / "rlctl"


def _mark(path: Path) -> str | None:
    """Return what a copy of the folder does not have; None before the folder was ever locked.

    A hard link of the lock file is in another folder; a copy of it was changed at another time.
    """
    try:
        folder = path.stat()
        lock = (path / LOCK_FILE).stat()
    except OSError:
        return None
    return f"{folder.st_ino}:{lock.st_ino}:{lock.st_ctime_ns}"
