"""Kinds of entries in the tables of verl's keys, and their patterns.

A pattern is a dotted key in which `{a,b}` matches one of several words and `*` any rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any


@dataclass(frozen=True, slots=True)
class Feature:
    """Part of verl that rlctl lacks: the sentence of the error, and what works."""

    sentence: str
    hint: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Keys of verl without a counterpart, and the values that may be dropped.

    `accepted` holds the values that ask for what rlctl does anyway; None accepts every value.
    Other values are refused: with the sentence of `feature`, or with `hint`. `depends` marks keys
    that have no effect because the key that they belong to is refused or off.
    """

    keys: str
    reason: str
    accepted: tuple[Any, ...] | None = None
    feature: Feature | None = None
    hint: str | None = None
    depends: bool = False

    def accepts(self, value: Any) -> bool:
        """Return True if the setting may be dropped. `1` is not `True` here, but `0` is `0.0`."""
        if self.accepted is None:
            return True
        return any(
            value == each and isinstance(value, bool) is isinstance(each, bool)
            for each in self.accepted
        )


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern; each `{…}` and `*` is a group."""
    text = re.escape(pattern).replace(r"\{", "(").replace(r"\}", ")").replace(r"\*", "(.*)")
    return re.compile(text.replace(",", "|") + r"\Z")


def alternatives(pattern: str) -> Iterator[str]:
    """Yield the texts that a pattern stands for; a `*` stays."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    for chosen in product(*choices):
        yield "".join(chosen)


def no_effect(keys: str, reason: str) -> Rule:
    """Return a rule that accepts every value."""
    return Rule(keys, reason)


def depends(keys: str, reason: str) -> Rule:
    """Return a rule for keys that matter only with another key, which is refused or off."""
    return Rule(keys, reason, depends=True)


def only(keys: str, accepted: tuple[Any, ...], reason: str, hint: str | None = None) -> Rule:
    """Return a rule that accepts some values and refuses others with `hint`."""
    return Rule(keys, reason, accepted, hint=hint)


def needs(keys: str, feature: Feature, off: tuple[Any, ...] = ()) -> Rule:
    """Return a rule that refuses a feature unless its key has a value of `off`."""
    return Rule(keys, feature.sentence, off, feature)
