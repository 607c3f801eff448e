"""Layers of values over each other, and the record of where each value came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.errors import Problem
from rlctl.recipes.aliases import translate
from rlctl.recipes.foreign import instead_of
from rlctl.recipes.keys import known_key, schema_keys
from rlctl.recipes.sources import Source
from rlctl.recipes.suggest import did_you_mean

MISSING = "???"
Level = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class Origin:
    """One setting of a key: the value as written (an interpolation stays one), where, and at which level (base, recipe, command line)."""

    value: Any
    where: str
    level: Level


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
    """Merges layers, lowest first. Problems are collected, not raised, so that a user sees all of them at once."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, list[Origin]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    _refused: set[tuple[str, str]] = field(default_factory=set)

    def add_file(self, source: Source, package: str, level: Level) -> None:
        """Lay a file's values over what is there, below `package` (dotted; empty = the root)."""
        if not source.data:
            return
        prefix = tuple(package.split(".")) if package else ()
        for path, value in _leaves(source.data, prefix):
            local = ".".join(path[len(prefix) :])
            self._set(path, value, source.where(local), level)

    def add_setting(self, setting: Setting) -> None:
        """Lay one override of the command line over what is there."""
        path = tuple(setting.key.split("."))
        if setting.delete:
            self._delete(path, setting)
        elif isinstance(setting.value, dict) and setting.value:
            for inner, value in _leaves(setting.value, path):
                self._set(inner, value, setting.where, 3)
        else:
            self._set(path, setting.value, setting.where, 3)

    def _set(self, path: tuple[str, ...], value: Any, where: str, level: Level) -> None:
        translated = translate(".".join(path), value, where)
        if translated.problem is not None:
            self.problems.append(translated.problem)
        if translated.notice is not None and translated.notice not in self.notices:
            self.notices.append(translated.notice)
        if translated.key is None:
            return
        if translated.key != ".".join(path):
            path = tuple(translated.key.split("."))
        if not self._accepts(path, value, where):
            return
        node = self.tree
        for name in path[:-1]:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        if value == {} and node.get(path[-1]):
            return
        node[path[-1]] = value
        self.origins.setdefault(".".join(path), []).append(Origin(value, where, level))

    def _accepts(self, path: tuple[str, ...], value: Any, where: str) -> bool:
        """Whether the schema knows this key and the value has its shape. What it refuses becomes a problem, once a place."""
        name = ".".join(path)
        key = known_key(name)
        if key is None:
            unknown = next(".".join(path[: i + 1]) for i in range(len(path)) if known_key(".".join(path[: i + 1])) is None)
            above = known_key(unknown.rpartition(".")[0])
            if (unknown, where) in self._refused:
                return False
            self._refused.add((unknown, where))
            if above is not None and above.kind == "value":
                self.problems.append(Problem(f"{above.name} is {above.type}; it has no keys of its own", where, f"write {above.name}=…"))
            else:
                hint = instead_of(unknown) or did_you_mean(unknown, schema_keys())
                self.problems.append(Problem(f"unknown key {unknown}", where, hint))
            return False
        if key.kind == "section" and value != {}:
            first = next(other for other in schema_keys() if other.startswith(f"{name}."))
            if value is None:
                self.problems.append(
                    Problem(f"{name} is an empty section", where, f"take the line out, or set a key below it, such as {first}")
                )
            else:
                self.problems.append(
                    Problem(f"{name} is a section, not a value (given: {value!r})", where, f"set one of its keys, such as {first}")
                )
            return False
        if key.kind == "open" and key.name == name and not isinstance(value, dict) and not _reference(value):
            self.problems.append(Problem(f"{name} should be a mapping, not {value!r}", where, f"{name}={{name: value}}"))
            return False
        return key.kind != "section"

    def _delete(self, path: tuple[str, ...], setting: Setting) -> None:
        name = ".".join(path)
        key = known_key(name)
        if key is None:
            self.problems.append(Problem(f"unknown key {name}", setting.where, did_you_mean(name, schema_keys())))
            return
        if key.kind != "open" or key.name == name:
            hint = "every key of the schema has a value; set another one" + (", or null" if key.nullable else "")
            self.problems.append(Problem(f"{name} cannot be taken out", setting.where, hint))
            return
        node: Any = self.tree
        for part in path[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict) or path[-1] not in node:
            self.problems.append(Problem(f"{name} is not set, so it cannot be taken out", setting.where))
            return
        del node[path[-1]]
        for gone in [other for other in self.origins if other == name or other.startswith(f"{name}.")]:
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
