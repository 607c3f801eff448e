"""Tables of `rlctl reward test`."""

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
            str(row["answer"]),
            f"{row['score']:g}",
            visible(str(row["ground_truth"])),
            visible(_end(row["response"])),
            row["error"]
            or ", ".join(f"{name} {value:g}" for name, value in row["components"].items()),
        )
        for row in scored
    ]
    columns = ["response", "score", "ground truth", "ends with", "details"]
    stdout().print(table(columns, rows, right=["response", "score"]))


def print_pairs(pairs: Sequence[dict[str, Any]]) -> None:
    """Print one row per pair: both scores, their difference, and the ends of both texts."""
    rows = [
        (
            str(row["pair"]),
            f"{row['chosen']:.4g}",
            f"{row['rejected']:.4g}",
            f"{row['chosen'] - row['rejected']:+.4g}",
            row["error"] or visible(_end(row["chosen_response"], _WIDTH // 2)),
            visible(_end(row["rejected_response"], _WIDTH // 2)),
        )
        for row in pairs
    ]
    columns = ["pair", "chosen", "rejected", "margin", "chosen ends with", "rejected ends with"]
    stdout().print(table(columns, rows, right=columns[:4]))


def _end(text: str, width: int = _WIDTH) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else "…" + line[1 - width :]
