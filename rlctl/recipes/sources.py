"""YAML files as layers: what they say and on which line, where recipes are looked for, and which files a recipe leads to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import yaml

from rlctl.errors import ConfigError, NotFoundError, Problem
from rlctl.storage import local
from rlctl.suggest import did_you_mean

_PACKAGE = Path(__file__).parents[1]
# A wheel carries the top-level folder `recipes/` inside the package; a checkout has it beside the package.
LIBRARY = next(
    folder
    for folder in (_PACKAGE / "recipes" / "library", _PACKAGE.parent / "recipes")
    if folder.is_dir()
)
_ENV = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([^}]*))?\}")
_FLOAT = re.compile(
    r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


_Base: type[yaml.SafeLoader] = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # libyaml where PyYAML was built with it


class _Loader(_Base):
    """PyYAML's safe loader with `1e-6` a number (as in YAML 1.2) and dates left as text."""


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
    """One YAML file: its mapping without `defaults` and `hydra`, those two apart, and the line of every dotted key."""

    path: Path
    text: str
    data: dict[str, Any]
    defaults: list[Any]
    searchpath: list[Path]
    lines: dict[str, int]

    def where(self, key: str) -> str:
        """`file:line` of a key of this file, or of the nearest section above it."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.name}:{self.lines[key]}" if key else self.name

    @cached_property
    def name(self) -> str:
        """The path as shown to the user."""
        return shown(self.path)

    @property
    def about(self) -> str:
        """The comment at the top of the file, up to its first full stop."""
        comment = " ".join(
            line.lstrip("# ")
            for line in self.text.partition("defaults:")[0].splitlines()
            if line.startswith("#")
        )
        return comment.partition(". ")[0].rstrip(".")

    @property
    def included(self) -> list[str]:
        """The recipes that this one is built on."""
        return [
            entry.partition("@")[0]
            for entry in self.defaults
            if isinstance(entry, str) and entry != "_self_"
        ]


def shown(path: Path) -> str:
    """A path as the user would type it: relative where it lies below the current folder."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def read(path: Path) -> Source:
    """Read one YAML file. Raises ConfigError with file:line where it is not what a recipe or a part must be."""
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = dict(_lines(node, "", path)) if node is not None else {}
        data = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{shown(path)}:{mark.line + 1}:{mark.column + 1}" if mark else shown(path)
        raise ConfigError(
            f"not valid YAML: {error.problem}",
            where=place,
            hint="check indentation, colons and quotes there",
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read this file: {error}", where=shown(path)) from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"a recipe must be a mapping of keys, not {type(data).__name__}",
            where=f"{shown(path)}:1",
        )
    defaults = data.pop("defaults", None)
    source = Source(path, text, data, [] if defaults is None else defaults, [], lines)
    if not isinstance(source.defaults, list):
        raise ConfigError(
            "`defaults` must be a list",
            where=source.where("defaults"),
            hint="defaults: [ppo_trainer, _self_]",
        )
    source.searchpath.extend(_searchpath(source))
    return source


def _lines(node: yaml.Node, prefix: str, path: Path) -> Iterator[tuple[str, int]]:
    """Dotted key -> 1-based line; a key that is no text or stands twice is an error."""
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
                f"the key `{prefix}{key.value}` stands twice",
                where=f"{shown(path)}:{line}",
                hint=f"first on line {seen[key.value]}",
            )
        seen[key.value] = line
        yield f"{prefix}{key.value}", line
        yield from _lines(value, f"{prefix}{key.value}.", path)


def _searchpath(source: Source) -> Iterator[Path]:
    """Folders of `hydra.searchpath`, relative ones below the file's own folder. Takes `hydra` out of the data."""
    hydra = source.data.pop("hydra", None)
    if hydra is None:
        return
    entries = hydra.pop("searchpath", []) if isinstance(hydra, dict) else None
    if isinstance(hydra, dict) and hydra:
        other = next(iter(hydra))
        raise ConfigError(
            f"unknown key hydra.{other}",
            where=source.where(f"hydra.{other}"),
            hint="only hydra.searchpath has a meaning in a recipe of rlctl",
        )
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(
            "hydra.searchpath must be a list of folders",
            where=source.where("hydra.searchpath"),
            hint="[file://parts]",
        )
    for entry in entries:
        yield folder(entry, source.path.parent, source.where("hydra.searchpath"))


def folder(entry: str, base: Path, where: str) -> Path:
    """One entry of a search path as a folder: `file://DIR`, `pkg://package` or a bare DIR; `${oc.env:X}` and `~` are expanded."""

    def environment(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        if name in os.environ:
            return os.environ[name]
        if default is None:
            raise ConfigError(
                f"the environment variable {name} is not set", where=where, hint=f"export {name}=…"
            )
        return default

    text = _ENV.sub(environment, entry)
    scheme, _, rest = text.partition("://") if "://" in text else ("file", "", text)
    if scheme == "pkg":
        spec = find_spec(rest)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"the search path {entry} names no package that can be imported", where=where
            )
        return Path(next(iter(spec.submodule_search_locations)))
    if scheme != "file":
        raise ConfigError(
            f"the search path {entry} has an unknown scheme",
            where=where,
            hint="file://DIR or pkg://package",
        )
    path = (base / Path(rest).expanduser()).resolve()
    if not path.is_dir():
        raise ConfigError(
            f"the search path {entry} is no folder", where=where, hint=f"it stands for {path}"
        )
    return path


@cache
def library_recipes() -> dict[str, Path]:
    """The shipped recipes by name; level 1 (`*_trainer`) included."""
    return {path.stem: path for path in sorted(LIBRARY.glob("*.yaml"))}


def find_recipe(recipe: str | Path) -> Path:
    """The file of a recipe: a shipped name, a path or an address. Raises NotFoundError, which lists what there is."""
    text = os.fspath(recipe)
    if isinstance(recipe, str) and text in library_recipes():
        return library_recipes()[text]
    path = Path(local(text)).expanduser()
    if path.is_file():
        return path.resolve()
    beside = next(
        (p for p in (path.with_name(path.name + end) for end in (".yaml", ".yml")) if p.is_file()),
        None,
    )
    if beside is not None:
        return beside.resolve()
    names = list(library_recipes())
    raise NotFoundError(
        Problem(
            f"no recipe {text!r}",
            hint=did_you_mean(text, names)
            or f"shipped: {', '.join(names)}; or the path of a YAML file",
        )
    )


def search_folders(primary: Source, extra: list[Path]) -> list[Path]:
    """Where the parts of a recipe are looked for: its folder, its search path, those of the recipes it includes, the library.

    Raises ConfigError where recipes include each other in a circle.
    """
    folders: list[Path] = []

    def add(paths: list[Path]) -> None:
        folders.extend(path for path in paths if path not in folders)

    def visit(source: Source, trail: list[Path]) -> None:
        if source.path in trail:
            circle = " -> ".join(
                shown(path) for path in [*trail[trail.index(source.path) :], source.path]
            )
            raise ConfigError(
                f"a recipe includes itself: {circle}",
                where=source.where("defaults"),
                hint="take one of these out of `defaults`",
            )
        add(source.searchpath)
        for entry in source.defaults:
            if isinstance(entry, str) and entry != "_self_":
                if ".." in entry.split("/"):
                    hint = "write /group/part, or name the folder in hydra.searchpath"
                    raise ConfigError(
                        f"`..` has no meaning in a defaults list: {entry}",
                        where=source.where("defaults"),
                        hint=hint,
                    )
                found = find_part(entry.partition("@")[0].lstrip("/"), [*folders, LIBRARY])
                if found is not None:
                    visit(read(found), [*trail, source.path])

    add([primary.path.parent, *extra])
    visit(primary, [])
    return [*folders, LIBRARY] if LIBRARY not in folders else folders


def level_of(path: Path) -> Literal[1, 2]:
    """1 for the base and its parts, 2 for everything else on disk."""
    return (
        1
        if path.is_relative_to(LIBRARY)
        and (path.parent != LIBRARY or path.stem.endswith("_trainer"))
        else 2
    )


def find_part(name: str, folders: list[Path]) -> Path | None:
    """The file of a part or recipe by its name in `defaults` (`grpo`, `actor/dp_actor`), or None."""
    for base in folders:
        path = base / (name if name.endswith(".yaml") else f"{name}.yaml")
        if path.is_file():
            return path.resolve()
    return None
