"""Layers of values over each other, and the record of where each value came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlctl.errors import Problem
from rlctl.recipes.aliases import translate
from rlctl.recipes.keys import known_key, schema_keys
from rlctl.recipes.schema import Config
from rlctl.recipes.sources import Source
from rlctl.recipes.unsupported_verl_keys import replacement_for
from rlctl.suggest import did_you_mean

MISSING = "???"
Level = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class Origin:
    """One setting of a key: the value as written (an interpolation stays one), where, and at which level (base, recipe, command line)."""

    value: Any
    where: str
    level: Level


@dataclass(frozen=True)
class Recipe:
    """A composed configuration.

    `config` is judged; `container` is the same as plain data, interpolations resolved; `origins` has for every key the chain of its
    settings, newest last; `notices` are one-line remarks for the user (old keys that were accepted); `layers` are the files that were
    laid over each other, lowest first, with the package of each.
    """

    name: str
    path: Path
    config: Config
    container: dict[str, Any]
    origins: dict[str, list[Origin]]
    notices: list[str]
    layers: list[tuple[Path, str]]


@dataclass(frozen=True, slots=True)
class Setting:
    """One assignment of the command line: a dotted key, its value, the text as typed."""

    key: str
    value: Any
    text: str
    delete: bool = False

    @property
    def where(self) -> str:
        return f"override {self.text}"


@dataclass
class Layers:
    """Merges layers, lowest first. Problems are collected, not raised, so that a user sees all of them at once.

    `faulty` names the keys of which a problem was noted already.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, list[Origin]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)
    _refused: set[tuple[str, str]] = field(default_factory=set)

    def add_file(self, source: Source, package: str, level: Level) -> None:
        """Lay a file's values over what is there, below `package` (dotted; empty = the root)."""
        prefix = tuple(package.split(".")) if package else ()
        cut = len(package) + 1 if package else 0
        for path, value in _leaves(source.data, prefix):
            if path != prefix:
                self._set(path, value, lambda name: source.where(name[cut:]), level)

    def add_setting(self, setting: Setting) -> None:
        """Lay one override of the command line over what is there."""
        path = tuple(setting.key.split("."))
        if setting.delete:
            self._delete(path, setting)
        else:
            for inner, value in _leaves(setting.value, path):
                self._set(inner, value, lambda _: setting.where, 3)

    def add_problem(self, name: str, message: str, where: str | None, hint: str | None) -> None:
        """Note a problem with a key; the judge says nothing more of it."""
        self.faulty.add(name)
        self.problems.append(Problem(message, where, hint))

    def _set(
        self, path: tuple[str, ...], value: Any, place: Callable[[str], str], level: Level
    ) -> None:
        """Set one leaf, unless the schema refuses it. `place` gives where a key (or the section above it) stands."""
        name = ".".join(path)
        where = place(name)
        translated = translate(name, value, where)
        if translated.problem is not None:
            self.problems.append(translated.problem)
        if translated.notice is not None and translated.notice not in self.notices:
            self.notices.append(translated.notice)
        if translated.key is None:
            return
        if translated.key != name:
            name, path = translated.key, tuple(translated.key.split("."))
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
        """Whether the schema has this key. An unknown one becomes a problem, once for each section and place."""
        prefixes = [".".join(path[: i + 1]) for i in range(len(path))]
        unknown = next((prefix for prefix in prefixes if known_key(prefix) is None), None)
        key = known_key(prefixes[-1])
        if unknown is None and key is not None:
            dotted = next(
                (
                    part
                    for part, prefix in zip(path, prefixes, strict=True)
                    if "." in part and prefix in schema_keys()
                ),
                None,
            )
            if dotted is not None:
                self.problems.append(
                    Problem(
                        f"{dotted} is written with dots",
                        place(prefixes[-1]),
                        "in YAML, sections are nested",
                    )
                )
            return dotted is None
        unknown = unknown or prefixes[-1]
        where = place(unknown)
        if (unknown, where) in self._refused:
            return False
        self._refused.add((unknown, where))
        above = known_key(unknown.rpartition(".")[0])
        if above is not None and above.kind == "value":
            self.problems.append(
                Problem(
                    f"{above.name} is a {above.type}: it has no keys of its own",
                    where,
                    f"set {above.name} as a whole",
                )
            )
            return False
        shown, other = (prefixes[-1], unknown) if level == 3 else (unknown, prefixes[-1])
        hint = (
            replacement_for(shown)
            or did_you_mean(shown, schema_keys())
            or did_you_mean(other, schema_keys())
        )
        self.problems.append(Problem(f"unknown key {shown}", where, hint))
        return False

    def _fits(self, name: str, value: Any, where: str) -> bool:
        """Whether a section is not overwritten by a value, nor a mapping by something else."""
        key = schema_keys().get(name)
        if key is None or key.kind == "value":
            return True
        if key.kind == "open":
            if isinstance(value, dict) or _reference(value):
                return True
            self.add_problem(
                name, f"{name} should be a mapping, not {value!r}", where, f"{name}={{name: value}}"
            )
        elif value != {}:
            first = next(other for other in schema_keys() if other.startswith(f"{name}."))
            given = (
                "is an empty section"
                if value is None
                else f"is a section, not a value (given: {value!r})"
            )
            self.add_problem(
                name, f"{name} {given}", where, f"leave it out, or set a key of it, such as {first}"
            )
        return False

    def _delete(self, path: tuple[str, ...], setting: Setting) -> None:
        name = ".".join(path)
        key = known_key(name)
        if key is None:
            self.problems.append(
                Problem(f"unknown key {name}", setting.where, did_you_mean(name, schema_keys()))
            )
            return
        if key.kind != "open" or key.name == name:
            hint = "every key of the schema has a value; set another one" + (
                ", or null" if key.nullable else ""
            )
            self.problems.append(Problem(f"{name} cannot be taken out", setting.where, hint))
            return
        node: Any = self.tree
        for part in path[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict) or path[-1] not in node:
            self.problems.append(
                Problem(f"{name} is not set, so it cannot be taken out", setting.where)
            )
            return
        del node[path[-1]]
        for gone in [
            other for other in self.origins if other == name or other.startswith(f"{name}.")
        ]:
            del self.origins[gone]
        if not node:
            self.origins.setdefault(".".join(path[:-1]), []).append(Origin({}, setting.where, 3))


def _reference(value: Any) -> bool:
    return isinstance(value, str) and ("${" in value or value == MISSING)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    else:
        yield path, value


def leaves(container: dict[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of a nested container; lists and empty mappings are values."""
    return {".".join(path): value for path, value in _leaves(container, ()) if path}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """The other way round: dotted keys as sections in sections."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree
