"""Place of a run, which tells a run from a copy of its folder."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlctl.runs.process import LOCK_FILE


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
