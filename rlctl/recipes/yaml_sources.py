"""YAML files of recipes and parts, with the line of every key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import ConfigError

_FLOAT = re.compile(
    r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
# libyaml, if PyYAML was built with it
_Base: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """PyYAML's safe loader that reads `1e-6` as a number (as in YAML 1.2) and dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass(frozen=True)
class Source:
    """One YAML file: its values, its defaults list, its search path and the line of every key."""

    path: Path
    text: str
    data: dict[str, Any]  # without `defaults` and `hydra`
    defaults: list[Any]
    searchpath: list[str]
    lines: dict[str, int]

    def where(self, key: str) -> str:
        """Return `file:line` of a key, or of the nearest section above it that the file has."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.name}:{self.lines[key]}" if key else self.name

    @cached_property
    def name(self) -> str:
        """Path as shown to the user."""
        return shown(self.path)

    @property
    def about(self) -> str:
        """First sentence of the comment at the top of the file."""
        comment = " ".join(
            line.lstrip("# ")
            for line in self.text.partition("defaults:")[0].splitlines()
            if line.startswith("#")
        )
        return re.split(r"(?<!\bDr)\. ", comment, maxsplit=1)[0].rstrip(".")

    @property
    def included(self) -> list[str]:
        """Names of the recipes and bases that this recipe includes."""
        return [
            entry.partition("@")[0]
            for entry in self.defaults
            if isinstance(entry, str) and entry != "_self_"
        ]


def shown(path: Path) -> str:
    """Return a path as the user would type it: relative if it is below the current folder."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def read(path: Path) -> Source:
    """Read one YAML file. Raises ConfigError with file:line if it is not a valid recipe or part."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
        if "&" in text:
            from rlctl.recipes.yaml_errors import check_size

            check_size(node)
        lines: dict[str, int] = {}
        data = {}
        if node is not None:
            lines = dict(_lines(node, "", path))
            data = loader.construct_document(node)
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        from rlctl.recipes.yaml_errors import unreadable

        raise unreadable(error, text, shown(path)) from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"a recipe must be a mapping of keys, not {type(data).__name__}",
            where=f"{shown(path)}:1",
        )
    defaults = data.pop("defaults", None)
    if defaults is None:
        defaults = []
    hydra = data.pop("hydra", None)
    source = Source(path, text, data, defaults, [], lines)
    if not isinstance(source.defaults, list):
        raise ConfigError(
            "`defaults` must be a list",
            where=source.where("defaults"),
            hint="defaults: [ppo_trainer, _self_]",
        )
    if hydra is not None:
        source.searchpath.extend(_searchpath(hydra, source))
    return source


def _lines(node: yaml.Node, prefix: str, path: Path) -> Iterator[tuple[str, int]]:
    """Yield each dotted key and its line. Raises ConfigError for duplicates and non-text."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.tag != "tag:yaml.org,2002:str":
            raise ConfigError(
                f"the key `{getattr(key, 'value', key.tag)}` is not text",
                where=f"{shown(path)}:{line}",
                hint="put it in quotes",
            )
        if key.value in seen:
            raise ConfigError(
                f"the key `{prefix}{key.value}` occurs twice",
                where=f"{shown(path)}:{line}",
                hint=f"first on line {seen[key.value]}",
            )
        seen[key.value] = line
        yield f"{prefix}{key.value}", line
        yield from _lines(value, f"{prefix}{key.value}.", path)


def _searchpath(hydra: Any, source: Source) -> list[str]:
    """Return the entries of `hydra.searchpath`. Raises ConfigError for other keys of `hydra`."""
    if not isinstance(hydra, dict):
        hydra = {"searchpath": None}
    entries = hydra.get("searchpath", [])
    if other := [key for key in hydra if key != "searchpath"]:
        raise ConfigError(
            f"unknown key hydra.{other[0]}",
            where=source.where(f"hydra.{other[0]}"),
            hint="recipes may only set hydra.searchpath",
        )
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(
            "hydra.searchpath must be a list of folders",
            where=source.where("hydra.searchpath"),
            hint="[file://parts]",
        )
    return entries
