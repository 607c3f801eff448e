"""Tables of the suite's rows: for a terminal, and as a section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu.recorder import NOTE

Row = Mapping[str, Any]
TITLES = {
    "correctness": "Correctness",
    "kernels": "Kernels",
    "throughput": "Training throughput",
    "generation": "Generation",
    "steps": "Steps by phase",
    "curve": "Learning curve of the quickstart",
    "link": "Link of weight sync",
    "memory": "Peak memory and plan",
}
_OWN = ("part", "table")


def tables(rows: Iterable[Row]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table, in the order of `TITLES`, without the notes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["table"] != NOTE:
            values = {name: value for name, value in row.items() if name not in _OWN}
            found.setdefault(row["table"], []).append(values)
    return {name: found[name] for name in (*TITLES, *found) if name in found}


def notes(rows: Iterable[Row]) -> list[str]:
    """Return a line for each thing that was not measured."""
    return [f"{row['part']}: {row['what']}: {row['why']}" for row in rows if row["table"] == NOTE]


def failures(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of checks that do not hold."""
    return [row for row in rows if row.get("ok") is False]


def columns(rows: Iterable[Row]) -> list[str]:
    """Return the columns of a table, in the order of their first row; those all None are left."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if any(row.get(name) is not None for row in rows)]


def cell(value: Any) -> str:
    """Return a value as text: three digits, yes or no, or a dash for what is missing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, float):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(facts: Mapping[str, str], rows: list[Row]) -> str:
    """Return a section for docs/benchmarks.md."""
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "command")
    lines = ["## GPU suite", "", f"`{facts['command']}`: {known}."]
    for name, found in tables(rows).items():
        names = columns(found)
        lines += [
            "",
            f"### {TITLES.get(name, name)}",
            "",
            _line(names),
            _line(["---"] * len(names)),
        ]
        lines += [_line([cell(row.get(each)) for each in names]) for row in found]
    if missing := notes(rows):
        lines += ["", "Not measured:", "", *(f"* {each}" for each in missing)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(each.replace('|', '/').replace('_', ' ') for each in cells)} |"


def text(rows: list[Row]) -> str:
    """Return the tables with aligned columns."""
    lines: list[str] = []
    for name, found in tables(rows).items():
        names = columns(found)
        body = [names, *([cell(row.get(each)) for each in names] for row in found)]
        widths = [max(len(line[i]) for line in body) for i in range(len(names))]
        lines += ["", TITLES.get(name, name)]
        lines += [
            "  " + "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True))
            for line in body
        ]
    if missing := notes(rows):
        lines += ["", "Not measured", *(f"  {each}" for each in missing)]
    return "\n".join(lines)
