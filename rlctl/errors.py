"""The error tree. Every error a user can meet says what was wrong, what was given and what would work.

RlctlError (1)
├── UsageError (2)         the command line itself
├── ConfigError (3)        a recipe, an override, a data file or a model folder: all problems at once
├── NotFoundError (4)      a run, a file, a recipe
├── ConflictError (5)      something is there already, or is running
├── MissingExtraError (6)  an optional package
├── ResourceError (7)      devices, memory, disk, Ray
│   └── DeviceMemoryError  a micro-batch that does not fit
└── InternalError (70)     a defect of rlctl

The number is the exit code. All of them pickle: they cross process borders.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

# Exit codes of what no second attempt would mend: usage, configuration, something not found or taken, a package that is missing.
HOPELESS = (2, 3, 4, 5, 6)
# Of what somebody asked to end: a lost terminal, Ctrl-C, SIGTERM.
ASKED = (129, 130, 143)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `message`, `where` it stands (file:line, a key, an override), and what would work (`hint`)."""

    message: str
    where: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.hint:
            lines.append(f"  help: {self.hint}")
        return "\n".join(lines)


class RlctlError(Exception):
    """A run or a command failed. Carries one problem or several, which are printed together."""

    exit_code = 1

    def __init__(
        self, *problems: Problem | str, where: str | None = None, hint: str | None = None
    ) -> None:
        self.problems: list[Problem] = [
            p if isinstance(p, Problem) else Problem(p, where, hint) for p in problems
        ]
        super().__init__("\n".join(str(p) for p in self.problems))

    def __reduce__(self) -> tuple[type[RlctlError], tuple[Problem, ...], dict[str, object]]:
        return type(self), tuple(self.problems), self.__dict__


class UsageError(RlctlError):
    """The command line asks for something that does not exist or does not fit together."""

    exit_code = 2


class ConfigError(RlctlError):
    """A recipe, an override, a data file, a reward file or a model folder is not what it must be."""

    exit_code = 3


class NotFoundError(RlctlError):
    """A run, a recipe or a file that was named is not there."""

    exit_code = 4


class ConflictError(RlctlError):
    """What should be made exists already, or is in use."""

    exit_code = 5


class MissingExtraError(RlctlError):
    """An optional package is needed; the hint is the command that installs it."""

    exit_code = 6


class ResourceError(RlctlError):
    """Not enough devices, memory or disk, or Ray does not start."""

    exit_code = 7


def as_ours(error: BaseException) -> RlctlError | None:
    """`error` as one of this tree: itself, or what a write is that was refused for want of room (a disk, a quota, a limit). Else None."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceError(
            f"no room to write: {error.strerror}",
            where=error.filename,
            hint="`rlctl doctor` shows what is free",
        )
    return error if isinstance(error, RlctlError) else None


class DeviceMemoryError(ResourceError):
    """A device's memory does not suffice for a micro-batch of the size that `key` allows: its `value` in the configuration, and what is
    `proposed` instead, None where no value of it would do."""

    def __init__(
        self,
        *problems: Problem | str,
        key: str = "",
        value: int = 0,
        proposed: int | None = None,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(*problems, where=where, hint=hint)
        self.key, self.value, self.proposed = key, value, proposed


class InternalError(RlctlError):
    """A defect of rlctl itself."""

    exit_code = 70


def raise_problems(problems: Sequence[Problem], kind: type[RlctlError] = ConfigError) -> None:
    """Raise one error of `kind` that holds all problems, if there are any."""
    if problems:
        raise kind(*problems)


class Terminated(SystemExit):
    """A signal asked the process to end. Raised in the main thread, so that `finally` blocks run; the exit code is 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class TimeUp(SystemExit):
    """The time that a run was given is over: it was asked to end now, has been saved, and ends with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)
