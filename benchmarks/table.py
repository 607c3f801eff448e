"""Command line, process isolation and output shared by the benchmarks."""

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


def parse_arguments(description: str | None, **defaults: str | int) -> argparse.Namespace:
    """Parse the command line: `--json`, and an option of the same type for each of `defaults`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def show(title: str, rows: Sequence[Row], as_json: bool) -> None:
    """Print a table, or a JSON list of objects. All rows have the same columns."""
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


def in_fresh_process(function: Callable[..., Any], *args: object) -> Any:
    """Call `function(*args)` in a fresh process, so that measurements share no caches or memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result()
