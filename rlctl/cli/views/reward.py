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
            str(each["answer"]),
            f"{each['score']:g}",
            visible(str(each["ground_truth"])),
            visible(_end(each["response"])),
            each["error"]
            or ", ".join(f"{name} {value:g}" for name, value in each["components"].items()),
        )
        for each in scored
    ]
    columns = ["response", "score", "ground truth", "ends with", "details"]
    stdout().print(table(columns, rows, right=["response", "score"]))


def print_pairs(pairs: Sequence[dict[str, Any]]) -> None:
    """Print one row per pair: both scores, their difference, and the ends of both texts."""
    rows = [
        (
            str(each["pair"]),
            f"{each['chosen']:.4g}",
            f"{each['rejected']:.4g}",
            f"{each['chosen'] - each['rejected']:+.4g}",
            each["error"] or visible(_end(each["chosen_response"], _WIDTH // 2)),
            visible(_end(each["rejected_response"], _WIDTH // 2)),
        )
        for each in pairs
    ]
    columns = ["pair", "chosen", "rejected", "margin", "chosen ends with", "rejected ends with"]
    stdout().print(table(columns, rows, right=columns[:4]))


def _end(text: str, width: int = _WIDTH) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else "…" + line[1 - width :]
