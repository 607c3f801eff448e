"""Tables of the ladder's rows: for a terminal, and as a section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.recorder import NOTE

Row = Mapping[str, Any]
LADDER = "ladder"  # table of the rungs that were tried
TITLES = {
    LADDER: "Ladder",
    "machine": "Machine",
    "correctness": "Correctness",
    "ray": "Process of Ray",
    "vllm": "vLLM in the trainer's process",
    "engine": "Choices of vLLM",
    "steps": "Steps by phase",
    "memory": "Peak memory and plan",
    "link": "Link of weight sync",
    "kernels": "Kernels",
    "generation": "Generation",
    "throughput": "Training throughput",
    "trl": "Steps of GRPO beside TRL",
}
_OWN = ("rung", "table")


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
    return [f"{row['rung']}: {row['what']}: {row['why']}" for row in rows if row["table"] == NOTE]


def has_failed(rows: Iterable[Row]) -> bool:
    """Return True if a check does not hold, or what had to run did not."""
    return any(row.get("ok") is False or row.get("failed", False) for row in rows)


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


def markdown(command: str, rows: list[Row]) -> str:
    """Return a section for docs/benchmarks.md."""
    lines = ["## GPU ladder", "", f"`{command}`"]
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


def text(rows: Sequence[Row]) -> str:
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
