"""Codes of errors: messages, cause and fix of each, from the table `error_codes.toml`."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlctl.errors import RlctlError


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


@cache
def error_entries() -> dict[str, ErrorEntry]:
    """Return all entries of errors by code."""
    table = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {
        code: ErrorEntry(
            code, **{**row, **{name: tuple(row.get(name, ())) for name in ("messages", "given")}}
        )
        for code, row in tomllib.loads(table).items()
    }


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
