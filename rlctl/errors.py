"""Error classes. Each error states what is wrong, what was given and what would work.

RlctlError (1)
├── UsageError (2)         command line
├── ConfigError (3)        recipe, override, data file or model folder: all problems at once
├── NotFoundError (4)      run, file or recipe
├── ConflictError (5)      already exists or is running
├── MissingExtraError (6)  optional package
├── ResourceError (7)      devices, memory, disk, Ray
│   └── DeviceMemoryError  micro-batch too large
└── InternalError (70)     bug in rlctl

The numbers are exit codes. All errors can be pickled and sent between processes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from rlctl.redaction import redact, redact_word

# Exit codes of errors that a retry cannot fix: usage, configuration, not found, conflict, extra.
PERMANENT_FAILURES = (2, 3, 4, 5, 6)
# Exit codes after SIGHUP, Ctrl-C and SIGTERM.
REQUESTED_STOPS = (129, 130, 143)
# Numbers of the OSErrors of a disk, quota or file size limit that is exhausted.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Words = str | tuple[str, ...]
Fix = tuple[Words, Words]


def _redacted(words: Words) -> Words:
    return redact_word(words) if isinstance(words, str) else tuple(map(redact_word, words))


@dataclass(frozen=True)
class Problem:
    """Wrong input: `message`, place (`where`: file:line, key, override) and `hint`.

    `fix` is a change of the command line that works: a word of it, or words in a row, or the key or
    value of an override, and what to write instead. Secrets in these texts are replaced. `code` is
    the code for `rlctl explain`; None: its message and the class of the error decide.
    """

    message: str
    where: str | None = None
    hint: str | None = None
    fix: Fix | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        for name in ("message", "where", "hint"):
            text = getattr(self, name)
            if text is not None:
                object.__setattr__(self, name, redact(text))
        if self.fix is not None:
            object.__setattr__(self, "fix", tuple(map(_redacted, self.fix)))

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.hint:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)

    @property
    def help(self) -> str | None:
        """The hint with commands of this environment's installer."""
        if self.hint is None or "pip " not in self.hint:
            return self.hint
        from rlctl.installer import adapted

        return adapted(self.hint)


class RlctlError(Exception):
    """Base class: failure of a run or command, with one or more problems printed together."""

    exit_code = 1
    code = "E-RUN"  # of messages without another code: `rlctl explain CODE`

    def __init__(
        self,
        *problems: Problem | str,
        where: str | None = None,
        hint: str | None = None,
        fix: Fix | None = None,
        code: str | None = None,
    ) -> None:
        self.problems: list[Problem] = [
            # A copy: secrets may have become known since the problem was found.
            replace(p) if isinstance(p, Problem) else Problem(p, where, hint, fix, code)
            for p in problems
        ]
        super().__init__("\n".join(str(p) for p in self.problems))

    def __reduce__(self) -> tuple[type[RlctlError], tuple[Problem, ...], dict[str, object]]:
        return type(self), tuple(self.problems), self.__dict__


class UsageError(RlctlError):
    """Invalid command line or argument."""

    exit_code = 2
    code = "E-USAGE"


class ConfigError(RlctlError):
    """Invalid recipe, override, data file, reward file or model folder."""

    exit_code = 3
    code = "E-CONFIG"


class NotFoundError(RlctlError):
    """Run, recipe or file that does not exist."""

    exit_code = 4
    code = "E-NOT-FOUND"


class ConflictError(RlctlError):
    """Target that already exists or is in use."""

    exit_code = 5
    code = "E-CONFLICT"


class MissingExtraError(RlctlError):
    """Missing optional package; the hint is the command that installs it."""

    exit_code = 6
    code = "E-EXTRA"


class ResourceError(RlctlError):
    """Too few devices, too little memory or disk space, or Ray does not start."""

    exit_code = 7
    code = "E-RESOURCE"


NO_ACCESS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


class DeviceMemoryError(ResourceError):
    """Out-of-memory error of a micro-batch whose size the config key `key` limits.

    `value` is the current value of the key, `proposed` a smaller one, None if none would work.
    """

    code = "E-OOM"

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
        self.key = key
        self.value = value
        self.proposed = proposed

    def with_plan(self, plan: str) -> DeviceMemoryError:
        """Return the error with the figures of the memory plan after its place."""
        first, *others = self.problems
        where = "\n      ".join(filter(None, (first.where, plan)))
        return DeviceMemoryError(
            *(replace(first, where=where), *others),
            key=self.key,
            value=self.value,
            proposed=self.proposed,
        )


class InternalError(RlctlError):
    """Bug in rlctl."""

    exit_code = 70
    code = "E-INTERNAL"


def raise_problems(problems: Iterable[Problem], kind: type[RlctlError] = ConfigError) -> None:
    """Raise one error of `kind` with all problems; no-op without problems."""
    if found := list(problems):
        raise kind(*found)


class Terminated(SystemExit):
    """Exit after a signal, with code 128 + its number.

    Raised in the main thread, so that `finally` blocks run. `latest` is the last one: a library
    may replace an exit that a signal handler raises by another one.
    """

    latest: ClassVar[Terminated | None] = None

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        Terminated.latest = self


class TimeUp(SystemExit):
    """Exit of a run that has reached its time limit and is saved; the code is 0."""

    def __init__(self) -> None:
        super().__init__(0)
