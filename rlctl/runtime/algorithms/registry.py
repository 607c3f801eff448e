"""Names to choose from, and one clear error for a name that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rlctl.errors import ConfigError, InternalError
from rlctl.plugins import suggestion

T = TypeVar("T")


class Registry(dict[str, T]):
    """Things of one `kind` by name; `key` is the config key that chooses among them, for the error message."""

    def __init__(self, kind: str, key: str) -> None:
        super().__init__()
        self.kind, self.key = kind, key

    def add(self, name: str, thing: T) -> None:
        """Register `thing`; a name that is taken is a defect of the code that registers."""
        if name in self:
            raise InternalError(f"{self.kind} {name!r} is registered twice")
        self[name] = thing

    def look_up(self, name: str) -> T:
        """The thing of that name, or `ConfigError` with the nearest name and the list of all."""
        if name not in self:
            raise unknown_name(self.kind, name, self, self.key)
        return self[name]


def unknown_name(kind: str, name: str, known: Iterable[str], key: str) -> ConfigError:
    """The error for a `name` that is none of the `known`."""
    return ConfigError(f"unknown {kind} {name!r}", where=key, hint=suggestion(name, list(known)))
