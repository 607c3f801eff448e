"""Installed packages: their versions, and errors for those that an extra would install."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from rlctl.errors import MissingExtraError


def require(module: str, user: str, extra: str, where: str | None = None) -> None:
    """Raise MissingExtraError if `module` of rlctl's `extra` is not installed.

    `user` begins the message: "LoRA needs peft".
    """
    if find_spec(module) is None:
        hint = f"pip install 'rlctl[{extra}]'"
        raise MissingExtraError(f"{user}, which is not installed", where=where, hint=hint)


@cache
def installed_version(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
