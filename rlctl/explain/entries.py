"""Descriptions of errors and metrics, from the tables `errors.toml` and `metrics.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.explain.patterns import alternatives

FOLDER = Path(__file__).parent
_PLACEHOLDER = re.compile(r"<\w+>")


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    """Code of an error: messages that have it, cause and fix.

    `messages` are the beginnings of messages, with … for any text, and `given` those whose error
    names the code. An entry without messages is for all other errors of its exit code.
    """

    code: str
    exit: int
    title: str
    cause: str
    fix: str
    messages: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    page: str = ""  # of the docs, with more about it


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
def error_entries() -> dict[str, ErrorEntry]:
    """Return all entries of errors by code."""
    return {
        code: ErrorEntry(
            code, **{**row, **{name: tuple(row.get(name, ())) for name in ("messages", "given")}}
        )
        for code, row in read_table("errors").items()
    }


@cache
def metric_entries() -> tuple[MetricEntry, ...]:
    """Return all entries of metrics."""
    return tuple(MetricEntry(name, **fields) for name, fields in read_table("metrics").items())


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a table of this package."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def message_pattern(template: str) -> re.Pattern[str]:
    """Return the expression for messages that begin as `template` says; … is any text."""
    return re.compile(".*".join(re.escape(part) for part in template.split("…")), re.DOTALL)


def code_of(message: str, error: RlctlError | type[RlctlError]) -> str:
    """Return the code of a message of `error`; that of its class if the message has none.

    Of several templates that match, the one with the most text decides.
    """
    matches = [
        (len(template), entry.code)
        for entry in error_entries().values()
        if entry.exit == error.exit_code
        for template in entry.messages
        if message_pattern(template).match(message)
    ]
    if not matches:
        return error.code
    return max(matches)[1]


def metric_entry(name: str) -> MetricEntry | None:
    """Return the first entry of a metric, also for a name with placeholders, or None."""
    for entry in metric_entries():
        for pattern in entry.names():
            literal = (re.escape(part) for part in _PLACEHOLDER.split(pattern))
            if pattern == name or re.fullmatch(".+".join(literal), name):
                return entry
    return None
