"""The token of a user's boards, in a file that no other user of the machine can read."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from rlctl.runs.ownership import state_folder

SHORTEST = 16  # characters
_LONGEST = 200


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(24)


def token_file() -> Path:
    """Return the file; it need not exist. Raises RuntimeError without a home folder."""
    return state_folder() / "board-token"


def stored_token() -> str | None:
    """Return the token in the user's file, which is made or made again as needed.

    A file that others own, may read or have linked is replaced by one with a new token. None if no
    file can be kept.
    """
    with suppress(OSError, RuntimeError):
        file = token_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for is_damaged in (False, True):
            if is_damaged:
                file.unlink()
            if (found := _read(file)) is None:
                _create(file, new_token())
                found = _read(file)  # of another board if that was faster
            if found is not None:
                return found
    return None


def _create(file: Path, token: str) -> None:
    """Write the file in one step, unless another process has."""
    aside = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(f"{token}\n")
        with suppress(FileExistsError):
            os.link(aside, file)
    finally:
        aside.unlink()


def _read(file: Path) -> str | None:
    """Return the token; None without a regular file that only this user may read and write."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.getuid() and not status.st_mode & 0o077
        if not stat.S_ISREG(status.st_mode) or not is_own:
            return None
        token = opened.read(_LONGEST).decode("ascii", errors="replace").strip()
    return token if len(token) >= SHORTEST and token.isprintable() and " " not in token else None
