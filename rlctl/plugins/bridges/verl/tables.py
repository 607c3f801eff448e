"""verl's keys and names of configurations, as `tables.yaml` has them."""

from __future__ import annotations

import re
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
    """Keys of verl without a counterpart; `tables.yaml` describes the fields."""

    keys: str
    drop: str = ""
    unused: str = ""
    now: str = ""
    accept: list[Any] | None = None
    feature: Feature | None = None
    hint: str | None = None
    words: list[str] | None = None
    equals: str = ""
    at_least: bool = False
    extends: str | None = None

    def accepts(self, value: Any) -> bool:
        """Return True if the setting may be dropped. `1` is not `True` here, but `0` is `0.0`."""
        if self.accept is None or (value == "" and None in self.accept):
            return True
        return any(
            value == word and isinstance(value, bool) is isinstance(word, bool)
            for word in self.accept
        )

    def expected(self, container: dict[str, Any]) -> Any:
        """Return the value of the key, or sum of keys, in `equals`; None if a part is missing."""
        values = [lookup(container, key) for key in self.equals.split(" + ")]
        if len(values) == 1:
            return values[0]
        if all(isinstance(value, int) for value in values):
            return sum(values)
        return None

    def agrees(self, given: Any, container: dict[str, Any]) -> bool:
        """Return True if the value `given` asks for what `container` has."""
        if not self.equals or given is None or (isinstance(given, str) and "${" in given):
            return True  # verl's default, a reference to the key that it repeats
        expected = self.expected(container)
        if self.at_least and isinstance(given, int) and isinstance(expected, int):
            return given >= expected
        return given == expected


def _pattern(text: str) -> str:
    return re.sub(r"<(\w+)>", lambda match: _DATA["names"][match[1]], text).replace(", ", ",")


def _pairs(table: str) -> list[tuple[str, Any]]:
    return [(_pattern(keys), here) for keys, here in _DATA[table].items()]


def _rule(keys: str, needs: str | None = None, **fields: Any) -> Rule:
    """Return a rule of the table: a feature alone accepts no value."""
    if needs is not None:
        feature = FEATURES[needs]
        fields = {"accept": [], "drop": feature.sentence} | fields | {"feature": feature}
    return Rule(_pattern(keys), **fields)


_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TEXT = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
_DATA: dict[str, Any] = yaml.load(_TEXT, Loader=_Loader)
FEATURES = {name: Feature(**row) for name, row in _DATA["features"].items()}
# (pattern, new key with \1 for the first group)
RENAMED, PLUGIN_SETTINGS, SFT_RENAMED = map(_pairs, ("renamed", "plugin_settings", "sft"))
READERS: dict[str, str] = _DATA["readers"]
WORDS = _pairs("words")  # (pattern, words of verl and words here)
RULES = [_rule(**row) for row in _DATA["rules"]]

TRAINER_CONFIGURATIONS: dict[str, list[str]] = _DATA["trainer_configurations"]
CONFIGURATIONS: dict[str, list[str]] = _DATA["configurations"]
MISSING_CONFIGURATIONS: dict[str, str] = _DATA["missing_configurations"]
PPO_MODULES: list[str] = _DATA["ppo_modules"]
DEFAULT_CONFIGURATIONS: dict[str, str] = _DATA["default_configurations"]
