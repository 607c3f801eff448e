"""How commands talk: data to stdout, talk to stderr, both through rich, which honours NO_COLOR, FORCE_COLOR and dumb terminals."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlctl.errors import Problem


class _Pipe(Console):
    """A pipe has no edge to wrap at: a table is as wide as it needs to be, and its lines end where their text does."""

    def __init__(self) -> None:
        super().__init__(width=10_000, highlight=False, soft_wrap=True)

    def print(self, *objects: Any, **options: Any) -> None:
        if not any(isinstance(each, Table) for each in objects):
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write(re.sub(" +$", "", captured.get(), flags=re.MULTILINE))


@functools.cache
def stdout() -> Console:
    """Where data goes."""
    return Console(highlight=False) if sys.stdout.isatty() else _Pipe()


@functools.cache
def stderr() -> Console:
    """Where talk goes: progress, notices, errors."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def paged() -> Iterator[None]:
    """What is printed to `stdout()` meanwhile appears page by page where there is a terminal, through PAGER or less; else straight on."""
    if not sys.stdout.isatty() or stdout().is_dumb_terminal:
        yield
        return
    os.environ.setdefault(
        "LESS", "-FRX"
    )  # as git has it: no paging of one page, colours, and the text stays
    with stdout().pager(styles=True):
        yield


def print_json(value: Any) -> None:
    """One JSON document on stdout, indented; values that JSON has no word for (paths, dates) as text, NaN refused."""
    sys.stdout.write(
        json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    )


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Iterable[str] = ()
) -> Table:
    """A listing without a frame, ready to print; the columns named in `right` are aligned to the right. The first
    column, which names the row, is never broken. Cells are text, never markup."""
    numeric = set(right)
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        made.add_column(
            column,
            justify="right" if column in numeric else "left",
            overflow="fold",
            no_wrap=index == 0,
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return made


def print_problems(problems: Iterable[Problem]) -> None:
    """Each problem on stderr: what was wrong, where it stands, what would work."""
    for problem in problems:
        stderr().print(Text.assemble(("error", "bold red"), f": {problem.message}"))
        if problem.where:
            stderr().print(Text.assemble(("  at", "bold"), f": {problem.where}"))
        if problem.hint:
            stderr().print(Text.assemble(("  help", "bold cyan"), f": {problem.hint}"))


def notice(message: str) -> None:
    """One line on stderr that is not an error."""
    stderr().print(Text.assemble(("note", "bold"), f": {message}"))


def warn(message: str) -> None:
    """One line on stderr about something that may not be what the user wants, but goes on."""
    stderr().print(Text.assemble(("warning", "bold yellow"), f": {message}"))
