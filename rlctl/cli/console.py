"""Data that commands print on stdout, through rich; `stderr` has the messages."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlctl.safe_console import SafeConsole

_GAP = 2  # columns between the cells of a table
_form: list[str] = []
_NARROWEST = 7  # columns of a cell that wraps: a word or two


class _PipeConsole(SafeConsole):
    """Console for a pipe: tables are as wide as needed, without trailing spaces."""

    def __init__(self) -> None:
        super().__init__(width=10_000, soft_wrap=True)

    def print(self, *objects: Any, **options: Any) -> None:
        if not any(isinstance(item, Table) for item in objects):
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write(re.sub(" +$", "", captured.get(), flags=re.MULTILINE))


def use_form(name: str) -> None:
    """Print only tables from now on, in the form `csv`, `md` or `tex`; `table`: as usual."""
    stdout.cache_clear()
    _form.clear()
    if name != "table":
        _form.append(name)


@functools.cache
def stdout() -> Console:
    """Return the console for data."""
    if _form:
        from rlctl.cli.table_forms import FormConsole

        return FormConsole(_form[0])
    if sys.stdout.isatty():
        return SafeConsole()
    return _PipeConsole()


@contextmanager
def paged() -> Iterator[None]:
    """Send output on `stdout()` within the block through PAGER or less, if it is a terminal."""
    if not sys.stdout.isatty() or stdout().is_dumb_terminal:
        yield
        return
    # The default of git: no paging of a single page, keep colours, keep the text on the screen.
    os.environ.setdefault("LESS", "-FRX")
    with stdout().pager(styles=True):
        yield


def print_json(value: Any) -> None:
    """Print an indented JSON document on stdout; paths and dates become text, dataclasses objects.

    Raises ValueError for NaN and infinity.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
    sys.stdout.write(text + "\n")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Iterable[str] = ()
) -> Table:
    """Build a table without borders; columns named in `right` are right-aligned.

    Cells of these do not wrap, nor those of the first column unless the terminal is too narrow.
    Cells are plain text, not markup.
    """
    rows = [[_as_cell(cell) for cell in row] for row in rows]
    numeric = set(right)
    widths = {
        index: max((row[index].cell_len for row in rows), default=0)
        for index, column in enumerate(columns)
        if column in numeric
    }
    first = max((row[0].cell_len for row in rows if row), default=0)
    others = sum(_GAP + (widths.get(index) or _NARROWEST) for index in range(1, len(columns)))
    if _NARROWEST + others > stdout().width:
        widths = {}
    built = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for index, column in enumerate(columns):
        built.add_column(
            column,
            justify="right" if column in numeric else "left",
            overflow="fold",
            no_wrap=index == 0 and (not numeric or first + others <= stdout().width),
            min_width=widths.get(index),
        )
    for row in rows:
        built.add_row(*row)
    return built


def _as_cell(cell: str | Text) -> Text:
    if isinstance(cell, Text):
        return cell
    return Text(cell)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Iterable[str] = ()
) -> None:
    """Print a `table` on stdout."""
    stdout().print(table(columns, rows, right))
