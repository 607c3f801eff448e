"""Temporary folder of a Ray session: for its owner alone, and removed with the session.

Ray gives everybody access to its folder, so that folder is inside one with mode 0700. Other
users can put files and links into `/tmp`: folders are opened without following links, and only
what this user's rlctl has created is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "rlctl-ray-"
_LOCK = "lock"
_RAY = "r"
_PARENT = Path("/tmp")  # short: socket paths in a session's folder may have 107 characters
_MARK = b"folder of an rlctl session\n"  # content of a lock
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextmanager
def session_folder() -> Iterator[Path]:
    """Yield a new folder for Ray's files, locked until this process exits, even if killed.

    Its parent, which belongs to this session too, has mode 0700. Both are removed at the end.
    """
    outer = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PARENT))
    try:
        lock = os.open(outer / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, _MARK)
            inner = outer / _RAY
            inner.mkdir()
            yield inner
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def remove_stale() -> None:
    """Remove the folders of sessions whose process was killed, with Ray's logs and sockets."""
    with suppress(OSError), _opened(_PARENT, os.O_RDONLY) as parent:
        for name in os.listdir(parent):
            if name.startswith(_PREFIX):
                with suppress(OSError):  # in use, just removed, or of another user
                    _remove_if_stale(name, parent)


def _remove_if_stale(name: str, parent: int) -> None:
    """Remove the folder `name` in `parent` if it is this user's and no process holds its lock."""
    with _opened(name, _FOLDER, parent) as folder:
        if not _is_private(os.fstat(folder)):
            return
        with _opened(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, folder) as lock:
            status = os.fstat(lock)
            if not (stat.S_ISREG(status.st_mode) and _is_private(status)):
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(lock, len(_MARK) + 1) == _MARK:
                shutil.rmtree(name, ignore_errors=True, dir_fd=parent)


def _is_private(status: os.stat_result) -> bool:
    """Return True for a file or folder of this user that nobody else has access to."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


@contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
