"""Errors of checks, and parts that checks share, so that all problems are reported at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

from rlctl.errors import RlctlError

P = ParamSpec("P")
T = TypeVar("T")


class Part(Generic[T]):
    """Property that is made once; if that raises an RlctlError, each use raises it again."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make = make
        self.name = make.__name__

    def __get__(self, owner: Any, _: type) -> T:
        made = owner.__dict__
        if self.name not in made:
            try:
                made[self.name] = self.make(owner)
            except RlctlError as error:
                made[self.name] = error
        if isinstance(made[self.name], RlctlError):
            raise made[self.name]
        return made[self.name]

    def __set__(self, owner: Any, value: T) -> None:
        owner.__dict__[self.name] = value


@dataclass
class ErrorCollector:
    """Errors of independent checks."""

    errors: list[RlctlError] = field(default_factory=list)

    def run(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of `check`, or None where it raises an `RlctlError`, which is kept."""
        try:
            return check(*args, **kwargs)
        except RlctlError as error:
            self.add(error)
            return None

    def add(self, error: RlctlError) -> None:
        """Keep an error, once."""
        if error not in self.errors:
            self.errors.append(error)

    def raise_all(self) -> None:
        """Raise one error with every problem once, if there is any.

        Its type is that of all errors, or `ConfigError` for a mixture. Missing packages are one
        problem with one command that installs all of them.
        """
        if not self.errors:
            return
        from rlctl.runtime.planning.combined_errors import combined

        raise combined(self.errors)
