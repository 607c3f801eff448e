"""Ratios that a benchmark has measured, for `make bench` and the comparison of two of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

FILE = "RLCTL_BENCH_RESULTS"  # environment variable: file with a JSON object per line
Better = Literal["higher", "lower"]


def record(name: str, ratio: float, better: Better) -> None:
    """Append a ratio to the file that `make bench` names; nothing without one."""
    if file := os.environ.get(FILE):
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"name": name, "ratio": ratio, "better": better}) + "\n")


def record_rows(rows: Sequence[Mapping[str, str | float]], columns: Mapping[str, Better]) -> None:
    """Record the ratios in `columns` of a table; its texts name them."""
    for row in rows:
        texts = [value for value in row.values() if isinstance(value, str)]
        for column, better in columns.items():
            record(", ".join([*texts, column]), float(row[column]), better)
