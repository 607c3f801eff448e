"""Translation of one setting of verl: renamed, dropped with a notice, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from rlctl.recipes.verl import tables
from rlctl.recipes.verl.patterns import alternatives, compiled
from rlctl.recipes.verl.tables import Agreement, Feature, Rule

Kind = Literal["", "renamed", "dropped", "unused", "refused"]


@dataclass(frozen=True, slots=True)
class Translation:
    """Present form of one setting: its `key` (None = not used) and `value`.

    `kind` says what became of it (empty: nothing) and `text` why: a line for the user, a reason, or
    the message of a refusal with its `hint` and missing `feature`. The value must agree with
    `agreement`, or is appended to that of `extends`. `flat` marks a setting of a plug-in that was
    given under verl's key.
    """

    key: str | None
    value: Any = None
    kind: Kind = ""
    text: str = ""
    hint: str | None = None
    feature: Feature | None = None
    agreement: Agreement | None = None
    flat: bool = False
    extends: str | None = None


def translate(key: str, value: Any, *, sft: bool = False) -> Translation:
    """Return the setting `key`=`value` under its present name.

    `sft` adds the keys of verl's SFT trainer.
    """
    given = f"{key}={written(value)}"
    moved, flat = _moved(key, sft)
    for pattern, words, feature in tables.REFUSED_WORDS:
        if isinstance(value, str) and value in words and _matches(pattern, key, moved):
            return _refused(feature)
    if sft and moved in tables.SFT_PATHS:
        path = tables.SFT_PATHS[moved]
        return Translation(None, None, "renamed", f"{key} is now part of {path}", extends=path)
    if key in tables.COMBINED:
        return Translation(None, None, "renamed", f"{key} {tables.COMBINED[key]}")
    agreement = next(
        (agreement for agreement in tables.AGREEMENTS if _matches(agreement.keys, moved)), None
    )
    if agreement is not None:
        reason = f"it is {agreement.expression}"
        return Translation(None, None, "dropped", reason, agreement=agreement)
    rule = _rule(moved)
    if rule is not None:
        if rule.accepts(value):
            return Translation(None, None, "unused" if rule.depends else "dropped", rule.reason)
        if rule.feature is not None:
            return _refused(rule.feature)
        hint = (rule.hint or f"{rule.reason}; remove it").replace("{value}", written(value))
        return Translation(None, None, "refused", f"{given} is not supported", hint)
    word = value
    for pattern, here in tables.WORDS:
        if isinstance(value, str | int | None) and value in here and _matches(pattern, key, moved):
            word = here[value]
    if (moved, word) == (key, value):
        return Translation(key, value)
    text = f"{key} is now {moved}" if word == value else f"{given} is now {moved}={word}"
    return Translation(moved, word, "renamed", text, flat=flat)


def aliases(key: str) -> list[str]:
    """Return verl's names of `key` that differ from it; those of its SFT trainer come last."""
    found = [
        alias
        for pattern, new in (*tables.PLUGIN_SETTINGS, *tables.RENAMED, *tables.SFT_RENAMED)
        for alias in _aliases(key, pattern, new)
    ]
    return [alias for alias in dict.fromkeys(found) if alias != key]


def _aliases(key: str, pattern: str, new: str) -> Iterator[str]:
    """Yield the names that `pattern` renames to `key`."""
    for old in alternatives(pattern):
        match = compiled(pattern).match(old)
        target = match.expand(new) if match else ""
        if target == key:
            yield old
        elif target.endswith("*") and key.startswith(head := target[:-1]):
            rest = key.removeprefix(head)
            if head.endswith(".") or rest.startswith((".", "_")) or not rest:
                yield old[:-1] + rest


def _refused(feature: Feature) -> Translation:
    return Translation(None, None, "refused", feature.sentence, feature.hint, feature)


def _matches(pattern: str, *names: str) -> bool:
    return any(compiled(pattern).match(name) for name in names)


@cache
def _moved(key: str, sft: bool) -> tuple[str, bool]:
    """Return the present name of a key, and True for a setting of a plug-in."""
    flat = False
    for table, is_setting in (
        (tables.SFT_RENAMED if sft else (), False),
        (tables.PLUGIN_SETTINGS, True),
    ):
        for pattern, new in table:
            if match := compiled(pattern).match(key):
                key, flat = match.expand(new), is_setting
                break
    for pattern, new in tables.RENAMED:
        if match := compiled(pattern).match(key):
            return match.expand(new), flat
    return key, flat


@cache
def _rule(key: str) -> Rule | None:
    """Return the rule of a key without a counterpart, or None."""
    return next((rule for rule in tables.RULES if _matches(rule.keys, key)), None)


def written(value: Any) -> str:
    """Return a value as an override writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
