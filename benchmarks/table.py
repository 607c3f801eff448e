"""What a benchmark is asked, where it measures, and what it prints."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, str | float]


def asked(description: str | None, **defaults: str | int) -> argparse.Namespace:
    """What the command line says: `--json`, and an option for each of `defaults`, of its type."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def show(title: str, rows: Sequence[Row], as_json: bool) -> None:
    """A table, or the rows as a list of objects. All rows have the same columns."""
    if as_json:
        print(json.dumps(list(rows), indent=1))
        return
    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(
            *(
                value
                if isinstance(value, str)
                else f"{value:,.4g}"
                if abs(value) < 100
                else f"{value:,.0f}"
                for value in row.values()
            )
        )
    print(title)
    Console(width=120).print(table)


def in_a_process(function: Callable[..., Any], *args: object) -> Any:
    """The answer of `function(*args)` from a fresh process, so that nothing is measured twice warm and all memory comes back."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result()
