"""Owner of this process: the command `rlctl`, which may end it, or a program that calls the API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_commands: list[bool] = []


def is_command() -> bool:
    """Return True in the process of a command, False in one that calls the Python API."""
    return bool(_commands)


@contextmanager
def command() -> Iterator[None]:
    """Let the block be a command."""
    _commands.append(True)
    try:
        yield
    finally:
        _commands.pop()
