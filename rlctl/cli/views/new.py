"""Columns, rows and next commands of `rlctl new`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlctl.cli.console import stderr, stdout, table
from rlctl.cli.views.data import print_row
from rlctl.terminal import visible

if TYPE_CHECKING:
    from rlctl.data_prep.raw_data import Column
    from rlctl.recipes.new_recipe import NewRecipe

_EXAMPLE = 60  # characters


def print_columns(columns: Sequence[Column]) -> None:
    """Print a numbered list of columns on stderr, with the value of a record."""
    rows = [
        (str(number), visible(each.name), each.kind, visible(f"{each.example!s:.{_EXAMPLE}}"))
        for number, each in enumerate(columns, 1)
    ]
    stderr().print(table(["", "column", "kind", "value"], rows, right=[""]))


def print_rows(entries: Iterable[Mapping[str, Any]]) -> None:
    """Print rows as the model will see them."""
    for entry in entries:
        print_row(dict(entry))


def print_next(recipe: NewRecipe) -> None:
    """Print the files to change and the command that starts the run."""
    out = stdout()
    out.print(f"\nchange     {recipe.path}, {recipe.reward}", markup=False)
    out.print(f"start      {recipe.command}", markup=False)
