"""Patterns of dotted keys: `{a,b}` matches one of several words and `*` any rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import product


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern; each `{…}` and `*` is a group."""
    text = re.escape(pattern).replace(r"\{", "(").replace(r"\}", ")").replace(r"\*", "(.*)")
    return re.compile(text.replace(",", "|") + r"\Z")


def alternatives(pattern: str) -> Iterator[str]:
    """Yield the texts that a pattern matches; a `*` is kept."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    yield from map("".join, product(*choices))
