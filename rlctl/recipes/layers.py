"""Merged layers of values, and the origin of every value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlctl.errors import Problem
from rlctl.recipes.dialects import Foreign, Translators
from rlctl.recipes.keys import known_key, schema_keys, similar_keys, suggest_key
from rlctl.recipes.schema import Config
from rlctl.recipes.slots import lookup
from rlctl.recipes.yaml_sources import Source
from rlctl.redaction import redact_word
from rlctl.suggest import did_you_mean, override_fix

MISSING = "???"
Level = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class Origin:
    """One setting of a key: its value as written, its place and its level.

    Levels: 1 = base, 2 = recipe, 3 = command line. An interpolation is kept as written.
    """

    value: Any
    where: str
    level: Level


@dataclass(frozen=True, slots=True)
class UnusedKey:
    """A key that was set and has no effect, with the reason."""

    key: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key} has no effect: {self.reason}"


@dataclass(frozen=True)
class Recipe:
    """A composed, validated configuration.

    `container` is `config` as plain data, interpolations resolved. `recorded` is the same for
    records and trackers: without secrets, and values from the environment as written. `origins` has
    the settings of every key, newest last. `notices` are lines for the user about old keys that
    were accepted. `layers` are the merged files, lowest first, each with its package. `unused` are
    the keys that composition dropped because they have no effect. `foreign` are the settings given
    in dialects.
    """

    name: str
    path: Path
    config: Config = field(repr=False)
    container: dict[str, Any] = field(repr=False)
    recorded: dict[str, Any] = field(repr=False)
    origins: dict[str, list[Origin]] = field(repr=False)
    notices: list[str] = field(repr=False)
    layers: list[tuple[Path, str]] = field(repr=False)
    unused: list[UnusedKey] = field(default_factory=list, repr=False)
    foreign: list[Foreign] = field(default_factory=list, repr=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """One assignment of the command line: a dotted key, its value, the text as typed."""

    key: str
    value: Any
    text: str
    delete: bool = False

    @property
    def where(self) -> str:
        """Place of the setting in messages."""
        return f"override {redact_word(self.text)}"


@dataclass
class Layers:
    """Merged layers, lowest first. Problems are collected so that a user sees all of them at once.

    `faulty` has the keys with a problem already noted. `flat` maps a plug-in's setting to the
    key of a dialect, if that was used to set it.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, list[Origin]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    translators: Translators = field(default_factory=Translators)
    faulty: set[str] = field(default_factory=set)
    flat: dict[str, str] = field(default_factory=dict)
    _refused: set[tuple[str, str]] = field(default_factory=set)

    def add_file(self, source: Source, package: str, level: Level) -> None:
        """Merge a file's values below `package` (dotted; empty = the root)."""
        prefix: tuple[str, ...] = ()
        cut = 0
        if package:
            prefix = tuple(package.split("."))
            cut = len(package) + 1
        for path, value in _leaves(source.data, prefix):
            if path != prefix:
                self._set(path, value, lambda name: source.where(name[cut:]), level)

    def add_setting(self, setting: Setting) -> None:
        """Merge one override of the command line."""
        path = tuple(setting.key.split("."))
        if setting.delete:
            self._delete(path, setting)
        else:
            for inner, value in _leaves(setting.value, path):
                self._set(inner, value, lambda _: setting.where, 3)

    def add_problem(self, name: str, message: str, where: str | None, hint: str | None) -> None:
        """Add a problem of a key; validation skips the key."""
        self.faulty.add(name)
        self.problems.append(Problem(message, where, hint))

    def imply(self, name: str, value: Any, where: str, level: Level) -> None:
        """Set `name`, which a setting of another key at `where` implies."""
        section, _, leaf = name.rpartition(".")
        lookup(self.tree, section)[leaf] = value
        self.origins.setdefault(name, []).append(Origin(value, where, level))

    def remove(self, path: tuple[str, ...], container: dict[str, Any]) -> None:
        """Remove a value and the values below it from `container` and from the origins."""
        node = lookup(container, ".".join(path[:-1]))
        if isinstance(node, dict):
            node.pop(path[-1], None)
        name = ".".join(path)
        for key in [key for key in self.origins if key == name or key.startswith(f"{name}.")]:
            del self.origins[key]

    def _set(
        self, path: tuple[str, ...], value: Any, place: Callable[[str], str], level: Level
    ) -> None:
        """Set one leaf, unless the schema refuses it.

        `place` returns the place of a key, or of the nearest section above it.
        """
        name = ".".join(path)
        where = place(name)
        translated = self.translators.translate(name, value, where)
        if translated.key is None:
            return
        value = translated.value
        if translated.key != name:
            if translated.flat:
                self.flat[translated.key] = name
            name = translated.key
            path = tuple(name.split("."))
        else:
            self.flat.pop(name, None)
        if not (self._is_known(path, place, level) and self._fits(name, value, where)):
            return
        node = self.tree
        for part in path[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        if value == {} and node.get(path[-1]):
            return
        node[path[-1]] = value
        self.origins.setdefault(name, []).append(Origin(value, where, level))

    def _is_known(self, path: tuple[str, ...], place: Callable[[str], str], level: Level) -> bool:
        """Return True if the schema has this key. An unknown key becomes one problem per place."""
        prefixes = [".".join(path[: i + 1]) for i in range(len(path))]
        unknown = next((prefix for prefix in prefixes if known_key(prefix) is None), None)
        if unknown is None:
            return not self._has_dotted_part(path, prefixes, place)
        where = place(unknown)
        value = known_key(unknown.rpartition(".")[0])
        if value is not None and value.kind != "value":
            value = None
        refused = (value.name if value else unknown, where)
        if refused in self._refused:
            return False
        self._refused.add(refused)
        if value:
            message = f"{value.name} is a {value.type}: it has no keys below it"
            example = value.name
            if value.type.startswith("list"):
                example += "=[…]"
            self.problems.append(Problem(message, where, f"set {example} as a whole"))
            return False
        shown, other = (prefixes[-1], unknown) if level == 3 else (unknown, prefixes[-1])
        hint = suggest_key(shown) or suggest_key(other) or "`rlctl config keys WORD` finds keys"
        values = [key for key in similar_keys(shown) if schema_keys()[key].kind == "value"]
        fix = override_fix(where, key=next(iter(values), None))
        self.problems.append(Problem(f"unknown key {shown}", where, hint, fix))
        return False

    def _has_dotted_part(
        self, path: tuple[str, ...], prefixes: list[str], place: Callable[[str], str]
    ) -> bool:
        """Return True for a key that YAML writes as `a.b: …`, which becomes a problem."""
        pairs = zip(path, prefixes, strict=True)
        dotted = next((part for part, key in pairs if "." in part and key in schema_keys()), None)
        if dotted is not None:
            where = place(prefixes[-1])
            message = f"the key {dotted} contains dots"
            self.problems.append(Problem(message, where, "in YAML, write nested sections"))
        return dotted is not None

    def _fits(self, name: str, value: Any, where: str) -> bool:
        """Return False if a value would replace a section, or a non-mapping a mapping."""
        key = schema_keys().get(name)
        if key is None or key.kind == "value":
            return True
        if key.kind == "open":
            is_reference = isinstance(value, str) and ("${" in value or value == MISSING)
            if isinstance(value, dict) or is_reference:
                return True
            message = f"{name} should be a mapping, not {value!r}"
            self.add_problem(name, message, where, f"{name}={{name: value}}")
        elif value != {}:
            below = (key for key in schema_keys().values() if key.name.startswith(f"{name}."))
            first = next(key.name for key in below if key.kind == "value")
            given = f"is a section, not a value (given: {value!r})"
            if value is None:
                given = "is an empty section"
            hint = f"remove it, or set a key of it, such as {first}"
            self.add_problem(name, f"{name} {given}", where, hint)
        return False

    def _delete(self, path: tuple[str, ...], setting: Setting) -> None:
        """Delete a key of an open mapping; other deletions become a problem."""
        name = ".".join(path)
        key = known_key(name)
        if key is None:
            hint = did_you_mean(name, schema_keys()) or "`rlctl config keys WORD` finds keys"
            self.problems.append(Problem(f"unknown key {name}", setting.where, hint))
            return
        if key.kind != "open" or key.name == name:
            hint = "every key of the schema has a value; set a different value"
            if key.nullable:
                hint += ", or null"
            self.problems.append(Problem(f"{name} cannot be removed", setting.where, hint))
            return
        node = lookup(self.tree, ".".join(path[:-1]))
        if not isinstance(node, dict) or path[-1] not in node:
            message = f"{name} is not set, so it cannot be removed"
            self.problems.append(Problem(message, setting.where))
            return
        self.remove(path, self.tree)
        if not node:
            self.origins.setdefault(".".join(path[:-1]), []).append(Origin({}, setting.where, 3))


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    else:
        yield path, value


def leaves(container: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a nested container by dotted key; empty mappings are values."""
    return {".".join(path): value for path, value in _leaves(container, ()) if path}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as nested sections: the inverse of `leaves`.

    An empty mapping does not replace values.
    """
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        if value != {} or leaf not in node:
            node[leaf] = value
    return tree
