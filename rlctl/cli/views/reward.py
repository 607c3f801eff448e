"""Table of `rlctl reward test`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.cli.console import stdout, table
from rlctl.terminal import visible

_WIDTH = 48


def print_scores(scored: Sequence[dict[str, Any]]) -> None:
    """Print one row per response: score, ground truth, end of the text, components or error."""
    rows = [
        (
            str(each["answer"]),
            f"{each['score']:g}",
            visible(str(each["ground_truth"])),
            visible(_end(each["response"])),
            each["error"] or _components(each["components"]),
        )
        for each in scored
    ]
    columns = ["response", "score", "ground truth", "ends with", "details"]
    stdout().print(table(columns, rows, right=["response", "score"]))


def _end(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else "…" + line[1 - _WIDTH :]


def _components(components: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in components.items())
