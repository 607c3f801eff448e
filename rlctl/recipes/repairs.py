"""Overrides that Hydra cannot parse: names of plug-ins in their keys, and repairs of values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import yaml

from rlctl.errors import Problem
from rlctl.recipes.slots import slot_with_setting
from rlctl.redaction import redact_word
from rlctl.suggest import hydra_text

PLAIN = re.compile(r"[\w.+/-]+", re.ASCII)  # text that needs no quotes
_NAME_OF_KEY = re.compile(r"(?P<before>[{,]\s*[A-Za-z_][\w./-]*):(?P<name>[A-Za-z_]\w*)(?=\s*:\s)")
_ESCAPED = r"\g<before>\\:\g<name>"


def repaired(text: str) -> Iterator[str]:
    """Yield other forms of an override with `module:Name` in a key, where Hydra allows no colon."""
    key, equals, value = text.partition("=")
    bare = key.lstrip("~+")
    slot = slot_with_setting(bare)
    if slot is not None and slot.several and ":" in bare:
        before = key[: len(key) - len(bare)]
        yield f"{before}{slot.params}.{bare.rpartition(':')[2]}{equals}{value}"
    if value.startswith("{"):
        yield f"{key}={_NAME_OF_KEY.sub(_ESCAPED, value)}"


def unparsable(text: str, parse: Callable[[str], object | None]) -> Problem:
    """Return the problem of a value that Hydra cannot parse, with a repair that `parse` accepts.

    `parse` returns None for an override that Hydra cannot parse.
    """
    key, _, shown = redact_word(text).partition("=")
    message = f"the value of {key} cannot be parsed"
    where = f"override {redact_word(text)}"
    for verb, other in _repairs(key, shown):
        if parse(other) is not None:
            fix = redact_word(text), other
            return Problem(message, where, f"{verb} it: {shlex.quote(other)}", fix)
    return Problem(message, where, f"set {key} in a recipe: --recipe FILE.yaml")


def _repairs(key: str, value: str) -> Iterator[tuple[str, str]]:
    """Yield how an override that Hydra cannot parse may be repaired, and the repaired override.

    A list stays a list and a mapping a mapping: as texts they would be refused.
    """
    for opening, closing in ("[]", "{}"):
        missing = value.count(opening) - value.count(closing)
        if value.startswith(opening) and missing > 0:
            value = value + closing * missing
            yield "close", f"{key}={value}"
    if re.fullmatch(r"\[[^][{}\"'\\]*\]", value):  # a list of plain items
        items = [item.strip() for item in value[1:-1].split(",")]
        yield "quote", f"{key}={_hydra_value(items)}"
    if value.startswith(("[", "{")):
        with suppress(yaml.YAMLError):
            parts = yaml.load(value, yaml.BaseLoader)  # as texts
            yield "quote", f"{key}={_hydra_value(parts)}"
    if not value.startswith("{"):
        yield "quote", hydra_text(key, value)


def _hydra_value(value: Any) -> str:
    """Write lists and mappings of texts in Hydra's grammar."""
    if isinstance(value, list):
        return f"[{','.join(map(_hydra_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_hydra_key(name)}: {_hydra_value(inner)}" for name, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    if PLAIN.fullmatch(value):
        return value
    return hydra_text("", value).removeprefix("=")


def _hydra_key(name: str) -> str:
    return re.sub(r"([\\\[\](){}:=,\s])", r"\\\1", name)
