"""Translation of one setting of verl: renamed, dropped with a notice, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlctl.plugins.bridges.verl import tables
from rlctl.plugins.bridges.verl.tables import Feature, Rule
from rlctl.recipes.dialects import Kind, Translation
from rlctl.recipes.keys import without_empty_text
from rlctl.recipes.patterns import alternatives, compiled
from rlctl.suggest import written


@dataclass(frozen=True, slots=True)
class VerlTranslation(Translation):
    """Translation with the missing `feature` of a refusal, and the `rule` that applies."""

    feature: Feature | None = None
    rule: Rule | None = None


def translate(key: str, value: Any, *, sft: bool = False) -> VerlTranslation:
    """Return the setting `key`=`value` under its present name.

    `sft` adds the keys of verl's SFT trainer.
    """
    given = f"{key}={written(value)}"
    moved, flat = _moved(key, sft)
    value = without_empty_text(moved, value)
    is_text = isinstance(value, str)
    for rule in _rules(key, moved, sft):
        if rule.words is not None and not (is_text and value in rule.words):
            continue
        if rule.now:
            return VerlTranslation(None, None, "renamed", f"{key} {rule.now}", rule=rule)
        if rule.accepts(value):
            kind: Kind = "unused" if rule.unused else "dropped"
            return VerlTranslation(None, None, kind, rule.unused or rule.drop, rule=rule)
        if feature := rule.feature:
            return VerlTranslation(
                None, None, "refused", feature.sentence, feature.hint, feature=feature
            )
        hint = (rule.hint or f"{rule.drop}; remove it").replace("{value}", written(value))
        return VerlTranslation(None, None, "refused", f"{given} is not supported", hint)
    word = value
    for pattern, here in tables.WORDS:
        if isinstance(value, str | int | None) and value in here and _matches(pattern, key, moved):
            word = here[value]
    if (moved, word) == (key, value):
        return VerlTranslation(key, value)
    text = f"{key} is now {moved}"
    if word != value:
        text = f"{given} is now {moved}={word}"
    return VerlTranslation(moved, word, "renamed", text, flat=flat)


def aliases(key: str) -> list[str]:
    """Return verl's names of `key` that differ from it; those of its SFT trainer come last."""
    pairs = (*tables.PLUGIN_SETTINGS, *tables.RENAMED, *tables.SFT_RENAMED)
    names = (name for pattern, new in pairs for name in _aliases(key, pattern, new))
    return [name for name in dict.fromkeys(names) if name != key]


def _aliases(key: str, pattern: str, new: str) -> Iterator[str]:
    """Yield the names that `pattern` renames to `key`."""
    for old in alternatives(pattern):
        if (match := compiled(pattern).match(old)) is None:
            continue
        target = match.expand(new)
        if target == key:
            yield old
        elif target.endswith("*") and key.startswith(head := target[:-1]):
            rest = key.removeprefix(head)
            if head.endswith(".") or rest.startswith((".", "_")) or not rest:
                yield old[:-1] + rest


def _matches(pattern: str, *names: str) -> bool:
    return any(compiled(pattern).match(name) for name in names)


@cache
def _moved(key: str, sft: bool) -> tuple[str, bool]:
    """Return the present name of a key, and True for a setting of a plug-in."""
    flat = False
    renaming = [tables.PLUGIN_SETTINGS, tables.RENAMED]
    if sft:
        renaming.insert(0, tables.SFT_RENAMED)
    for table in renaming:
        for pattern, new in table:
            if match := compiled(pattern).match(key):
                key = match.expand(new)
                flat = flat or table is tables.PLUGIN_SETTINGS
                break
    return key, flat


@cache
def _rules(key: str, moved: str, sft: bool) -> list[Rule]:
    """Return the rules of a key; only those with words also match its name in verl."""
    known = [rule for rule in tables.RULES if sft or not rule.extends]
    return [
        rule
        for rule in known
        if _matches(rule.keys, moved) or (rule.words is not None and _matches(rule.keys, key))
    ]
