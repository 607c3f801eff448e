"""verl's keys and names of configurations, as `tables.yaml` has them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlctl.recipes.slots import lookup


@dataclass(frozen=True, slots=True)
class Feature:
    """Part of verl that rlctl lacks: the sentence of the error, and what works."""

    sentence: str
    hint: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Keys of verl without a counterpart, and the values that may be dropped (None = all).

    Other values are refused: with the sentence of `feature`, or with `hint`. `depends` marks keys
    that have no effect because the key that they belong to is refused or off.
    """

    keys: str
    reason: str
    accepted: list[Any] | None = None
    feature: Feature | None = None
    hint: str | None = None
    depends: bool = False

    def accepts(self, value: Any) -> bool:
        """Return True if the setting may be dropped. `1` is not `True` here, but `0` is `0.0`."""
        return self.accepted is None or any(
            value == word and isinstance(value, bool) is isinstance(word, bool)
            for word in self.accepted
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """Pattern of a repeated key, and the key, or sum of keys, that its value must agree with."""

    keys: str
    expression: str
    at_least: bool = False

    def value(self, container: dict[str, Any]) -> Any:
        """Return the value of the expression, or None for a sum with a missing part."""
        values = [lookup(container, key) for key in self.expression.split(" + ")]
        if len(values) == 1:
            return values[0]
        return sum(values) if all(isinstance(value, int) for value in values) else None

    def holds(self, given: Any, container: dict[str, Any]) -> bool:
        """Return True if the value `given` asks for what `container` has."""
        if given is None or (isinstance(given, str) and "${" in given):
            return True  # verl's default, a reference to the key that it repeats
        expected = self.value(container)
        if self.at_least and isinstance(given, int) and isinstance(expected, int):
            return given >= expected
        return given == expected


def _pattern(text: str) -> str:
    return re.sub(r"<(\w+)>", lambda match: _DATA["names"][match[1]], text).replace(", ", ",")


def _pairs(table: str) -> list[tuple[str, str]]:
    return [(_pattern(old), new) for old, new in _DATA[table].items()]


def _rules(rows: Iterable[dict[str, Any]]) -> list[Rule]:
    """Return the rules of the table: a feature alone accepts no value."""
    rules = []
    for row in rows:
        feature = FEATURES[row["needs"]] if "needs" in row else None
        reason = row.get("drop") or row.get("unused") or (feature.sentence if feature else "")
        accepted = row.get("accept", [] if feature else None)
        keys, hint = _pattern(row["keys"]), row.get("hint")
        rules.append(Rule(keys, reason, accepted, feature, hint, "unused" in row))
    return rules


_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DATA: dict[str, Any] = yaml.load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"),
    Loader=_Loader,
)
FEATURES = {name: Feature(**row) for name, row in _DATA["features"].items()}
# (pattern, new key with \1 for the first group)
RENAMED, PLUGIN_SETTINGS, SFT_RENAMED = map(_pairs, ("renamed", "plugin_settings", "sft"))
SFT_PATHS: dict[str, str] = _DATA["sft_paths"]
COMBINED: dict[str, str] = _DATA["combined"]
# (pattern, words of verl and words here)
WORDS: list[tuple[str, dict[Any, Any]]] = [
    (_pattern(row["keys"]), row["here"]) for row in _DATA["words"]
]
REFUSED_WORDS: list[tuple[str, list[str], Feature]] = [
    (_pattern(row["keys"]), row["words"], FEATURES[row["needs"]]) for row in _DATA["refused_words"]
]
AGREEMENTS = [Agreement(**{**row, "keys": _pattern(row["keys"])}) for row in _DATA["agreements"]]
RULES = _rules(_DATA["rules"])

PPO_CONFIGURATIONS: list[str] = _DATA["ppo_configurations"]
SFT_CONFIGURATIONS: list[str] = _DATA["sft_configurations"]
CONFIGURATIONS: dict[str, list[str]] = _DATA["configurations"]
MISSING_CONFIGURATIONS = {
    words: FEATURES[name] for words, name in _DATA["missing_configurations"].items()
}
PPO_MODULES: list[str] = _DATA["ppo_modules"]
DEFAULT_CONFIGURATIONS: dict[str, str] = _DATA["default_configurations"]
