"""Messages of commands on stderr, through rich, which honours NO_COLOR and dumb terminals."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from rlctl.errors import Problem
from rlctl.redaction import redact
from rlctl.safe_console import SafeConsole
from rlctl.terminal import visible


@functools.cache
def stderr() -> Console:
    """Return the console for messages: progress, notices, errors."""
    return SafeConsole(stderr=True, soft_wrap=True)


def print_problems(problems: Iterable[Problem]) -> None:
    """Print each problem on stderr: message, place and hint."""
    for problem in problems:
        stderr().print(Text.assemble(("error", "bold red"), f": {visible(problem.message)}"))
        if problem.where:
            stderr().print(Text.assemble(("  at", "bold"), f": {visible(problem.where)}"))
        if hint := problem.help:
            stderr().print(Text.assemble(("  help", "bold cyan"), f": {visible(hint)}"))


def print_see_also(codes: Iterable[str]) -> None:
    """Print the command that explains codes of errors, one line on stderr."""
    stderr().print(Text.assemble(("  see", "bold"), f": rlctl explain {' '.join(codes)}"))


def print_corrected(line: str, remaining: Sequence[Problem] = ()) -> None:
    """Print a command line that works in place of the user's, or what it still lacks, on stderr."""
    label = "corrected"
    if remaining:
        label = "corrected in part"
    for problem in remaining:
        stderr().print(Text.assemble(("remains", "bold"), f": {visible(problem.message)}"))
    stderr().print(Text.assemble((label, "bold green"), f": {visible(line)}"))


def notice(message: str) -> None:
    """Print a notice, one line on stderr."""
    stderr().print(Text.assemble(("note", "bold"), f": {visible(redact(message))}"))


def warn(message: str) -> None:
    """Print a warning, one line on stderr."""
    stderr().print(Text.assemble(("warning", "bold yellow"), f": {visible(redact(message))}"))
