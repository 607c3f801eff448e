"""Tables as CSV, Markdown and LaTeX: the option `--format` of commands that print tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from rlctl.cli.console import use_form
from rlctl.safe_console import SafeConsole

Form = Literal["table", "csv", "md", "tex", "json"]


def _use_form(ctx: typer.Context, form: Form) -> Form:
    if form not in ("table", "json"):
        use_form(form)
        ctx.call_on_close(lambda: use_form("table"))
    return form


Format = Annotated[
    Form, typer.Option("--format", callback=_use_form, help="Print tables in this form.")
]
Rows = Sequence[Sequence[str]]  # the first one is the head


class FormConsole(SafeConsole):
    """Console that prints the tables with a head in a form, and nothing else."""

    def __init__(self, form: str) -> None:
        super().__init__(width=10_000)
        self._write = FORMS[form]
        self._has_written = False

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ARG002
        for item in objects:
            if isinstance(item, Table) and item.show_header and any(_head(item)):
                self.file.write("\n" * self._has_written + self._write(cells(item)))
                self._has_written = True


def cells(table: Table) -> Rows:
    """Return the head and the rows of a table as text."""
    columns = [map(_text, column.cells) for column in table.columns]
    return [_head(table), *map(list, zip(*columns, strict=True))]


def as_csv(rows: Rows) -> str:
    """Return rows as CSV."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    return written.getvalue()


def as_markdown(rows: Rows) -> str:
    """Return rows as a table of Markdown."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines
    )


def as_tex(rows: Rows) -> str:
    """Return rows as a LaTeX table with the rules of booktabs."""
    head, *body = (" & ".join(map(_tex, row)) + r" \\" for row in rows)
    begin = r"\begin{tabular}{" + "l" + "r" * (len(rows[0]) - 1) + "}"
    lines = [begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


FORMS: Mapping[str, Callable[[Rows], str]] = {
    "csv": as_csv,
    "md": as_markdown,
    "markdown": as_markdown,
    "tex": as_tex,
}


def _head(table: Table) -> list[str]:
    return [_text(column.header) for column in table.columns]


def _text(cell: Any) -> str:
    if isinstance(cell, Text):
        return cell.plain
    return str(cell)


def _tex(text: str) -> str:
    escaped = "".join(f"\\{char}" if char in "#$%&_{}" else char for char in text)
    signs = {"−": "$-$", "±": r"$\pm$", "→": r"$\to$", "~": r"\textasciitilde{}"}
    return "".join(signs.get(char, char) for char in escaped)
