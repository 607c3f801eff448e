"""Places in users' code: frames of a traceback that belong neither to rlctl nor to a library."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path

_RLCTL = str(Path(__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+?)(?:\.py)?(?:[/\\]|$)")
# Top-level modules of loaded plug-ins outside rlctl, which may be installed packages.
plugin_packages: set[str] = set()

_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+)', re.MULTILINE)


def users_place(error: BaseException, packages: Collection[str]) -> str | None:
    """Return file:line of the innermost frame of users' code in the traceback of `error`, or None.

    A syntax error is in the file that has it. Modules of the installed `packages` count as users'.
    """
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    return _innermost(frames, packages)


def users_place_in(text: str, packages: Collection[str]) -> str | None:
    """Return what `users_place` returns, for the printed traceback of another process."""
    return _innermost(((file, int(line)) for file, line in _FRAME.findall(text)), packages)


def _innermost(frames: Iterable[tuple[str, int | None]], packages: Collection[str]) -> str | None:
    places = [f"{file}:{line}" for file, line in frames if is_users_file(file, packages)]
    return next(reversed(places), None)


def is_users_file(file: str, packages: Collection[str]) -> bool:
    """Return True for a file of no library, or of one of `packages`."""
    if file.startswith(("<", _RLCTL)):
        return False
    library = _LIBRARY.search(file)
    if library is not None:
        return library[1] in packages
    return not file.startswith(_PYTHON)
