"""Collector of errors, so that all problems are reported at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from rlctl.errors import ConfigError, RlctlError

P = ParamSpec("P")
T = TypeVar("T")


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
        """Keep an error."""
        self.errors.append(error)

    def raise_all(self) -> None:
        """Raise one error with every problem once, if there is any.

        Its type is that of all errors, or `ConfigError` for a mixture.
        """
        if not self.errors:
            return
        kinds = {type(error) for error in self.errors}
        problems = dict.fromkeys(problem for error in self.errors for problem in error.problems)
        raise (kinds.pop() if len(kinds) == 1 else ConfigError)(*problems)
