"""Translation of one setting of verl: renamed, dropped with a notice, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rlctl.errors import Problem
from rlctl.recipes.verl import asynchronous, distillation, dropped, dropped_rollout, megatron
from rlctl.recipes.verl.agreements import AGREEMENTS, Agreement
from rlctl.recipes.verl.renamed import (
    MOVED,
    PLUGIN_SETTINGS,
    REFUSED_WORDS,
    SFT_MOVED,
    SFT_PATHS,
    VALUES,
)
from rlctl.recipes.verl.rules import Feature, Rule, compiled

RULES = (
    *megatron.RULES,
    *dropped.SHARDING,
    *dropped.TRAINING,
    *dropped.MODEL,
    *asynchronous.RULES,
    *dropped_rollout.RULES,
    *distillation.RULES,
)


@dataclass(frozen=True, slots=True)
class Translation:
    """Present form of one setting.

    `key` is its name (None = not used) and `value` its value. `renamed` is a line for the user,
    `dropped` the reason why the setting is not needed, `unused` why it has no effect. `problem` or
    `missing` say why it is refused, `agreement` what it must agree with. `flat` marks a setting of
    a plug-in that was given under verl's key. The value is appended to that of `extends`.
    """

    key: str | None
    value: Any = None
    renamed: str | None = None
    dropped: str | None = None
    unused: str | None = None
    problem: Problem | None = None
    missing: Feature | None = None
    agreement: Agreement | None = None
    flat: bool = False
    extends: str | None = None


def translate(key: str, value: Any, where: str, *, sft: bool = False) -> Translation:
    """Return the setting `key`=`value`, found at `where`, under its present name.

    `sft` adds the keys of verl's SFT trainer.
    """
    given = f"{key}={written(value)}"
    moved, flat = _moved(key, sft)
    for pattern, words in REFUSED_WORDS:
        if isinstance(value, str) and value in words and _matches(pattern, key, moved):
            return Translation(None, missing=words[value])
    if sft and moved in SFT_PATHS:
        return Translation(None, extends=SFT_PATHS[moved])
    if key in asynchronous.COMBINED:
        return Translation(None, renamed=f"{key} {asynchronous.COMBINED[key]}")
    agreement = next((each for each in AGREEMENTS if compiled(each.keys).match(moved)), None)
    if agreement is not None:
        reason = f"it is {agreement.expression}"
        return Translation(None, dropped=reason, agreement=agreement)
    rule = _rule(moved)
    if rule is not None:
        return _dropped(rule, given, value, where)
    word = value
    for pattern, words in VALUES:
        if isinstance(value, str | int | None) and value in words and _matches(pattern, key, moved):
            word = words[value]
    if (moved, word) == (key, value):
        return Translation(key, value)
    text = f"{key} is now {moved}" if word == value else f"{given} is now {moved}={word}"
    return Translation(moved, word, text, flat=flat)


def _matches(pattern: str, *names: str) -> bool:
    return any(compiled(pattern).match(name) for name in names)


@cache
def _moved(key: str, sft: bool) -> tuple[str, bool]:
    """Return the present name of a key, and True for a setting of a plug-in."""
    flat = False
    for table, is_setting in ((SFT_MOVED if sft else (), False), (PLUGIN_SETTINGS, True)):
        for pattern, new in table:
            if match := compiled(pattern).match(key):
                key, flat = match.expand(new), is_setting
                break
    for pattern, new in MOVED:
        if match := compiled(pattern).match(key):
            return match.expand(new), flat
    return key, flat


@cache
def _rule(key: str) -> Rule | None:
    """Return the rule of a key without a counterpart, or None."""
    return next((rule for rule in RULES if compiled(rule.keys).match(key)), None)


def _dropped(rule: Rule, given: str, value: Any, where: str) -> Translation:
    """Return the translation of a setting without a counterpart."""
    if rule.accepts(value):
        if rule.depends:
            return Translation(None, unused=rule.reason)
        return Translation(None, dropped=rule.reason)
    if rule.feature is not None:
        return Translation(None, missing=rule.feature)
    hint = (rule.hint or f"{rule.reason}; remove it").format(value=written(value))
    return Translation(None, problem=Problem(f"{given} is not supported", where, hint))


def written(value: Any) -> str:
    """Return a value as an override writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
