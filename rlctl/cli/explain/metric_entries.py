"""Descriptions of metrics, from the table `metrics.toml`, and the other tables of this package."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlctl.recipes.patterns import alternatives

FOLDER = Path(__file__).parent
_PLACEHOLDER = re.compile(r"<\w+>")


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """Metrics of one meaning; `name` may have alternatives {a,b} and placeholders <x>."""

    name: str
    means: str
    unit: str = ""
    normal: str = ""
    advice: str = ""

    def names(self) -> Iterator[str]:
        """Yield the names without alternatives, placeholders included."""
        return alternatives(self.name)


@cache
def metric_entries() -> tuple[MetricEntry, ...]:
    """Return all entries of metrics."""
    return tuple(MetricEntry(name, **fields) for name, fields in read_table("metrics").items())


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a table of this package."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def metric_entry(name: str) -> MetricEntry | None:
    """Return the first entry of a metric, also for a name with placeholders, or None."""
    for entry in metric_entries():
        for pattern in entry.names():
            literal = (re.escape(part) for part in _PLACEHOLDER.split(pattern))
            if pattern == name or re.fullmatch(".+".join(literal), name):
                return entry
    return None
