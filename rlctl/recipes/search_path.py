"""Search path of recipes and parts: the shipped library and the folders that recipes name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rlctl.errors import ConfigError, NotFoundError, Problem
from rlctl.recipes.dialects import dialects
from rlctl.recipes.slots import lookup
from rlctl.recipes.yaml_sources import Source, read, shown
from rlctl.storage import local
from rlctl.suggest import closest, did_you_mean

DEFAULT = "ppo"
MODEL = "actor_rollout_ref.model.path"


@dataclass(frozen=True)
class Verb:
    """Base NAME_trainer that has a quickstart, the recipe NAME.

    `model` is the key of its path, `example` a recipe for the user's data, `estimator` the base's.
    """

    about: str
    algorithm: str
    model: str
    example: str
    estimator: str | None


@cache
def verbs() -> dict[str, Verb]:
    """Return the verbs by name, the default first."""
    recipes = library_recipes()
    names = [name for name in recipes if f"{name}_trainer" in recipes]
    return {name: _verb(name) for name in sorted(names, key=lambda name: name != DEFAULT)}


def _verb(name: str) -> Verb:
    """Return what the base of a verb says; a key that it leaves out is that of the base's base."""
    base = read(library_recipes()[f"{name}_trainer"])
    model = lookup(base.data, MODEL) or MODEL  # a reference to another key, or nothing
    parent = [*base.included, DEFAULT][0].removesuffix("_trainer")
    example = f"gsm8k_{name}"
    return Verb(
        f"{base.about}.",
        lookup(base.data, "algorithm.name") or parent,
        model.strip("${}"),
        example if example in library_recipes() else name,
        lookup(base.data, "algorithm.adv_estimator"),
    )


_PACKAGE = Path(__file__).parents[1]
# A wheel has the top-level folder `recipes/` inside the package, a checkout beside the package.
LIBRARY = next(
    folder
    for folder in (_PACKAGE / "recipes" / "library", _PACKAGE.parent / "recipes")
    if folder.is_dir()
)
PARENT_HINT = "write /group/part, or name the folder in hydra.searchpath"
_ENV = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([^}]*))?\}")


@cache
def library_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name, bases (`*_trainer`) included."""
    return {path.stem: path for path in sorted(LIBRARY.glob("*.yaml"))}


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe given as shipped name, path or address.

    Raises NotFoundError, which lists the shipped recipes.
    """
    text = os.fspath(recipe)
    if isinstance(recipe, str) and text in library_recipes():
        return library_recipes()[text]
    path = Path(local(text)).expanduser()
    for candidate in (path, *(Path(f"{path}{end}") for end in (".yaml", ".yml"))):
        if candidate.is_file():
            return candidate.resolve()
    names = list(library_recipes())
    shipped = f"shipped recipes: {', '.join(names)}; or the path of a YAML file"
    near = closest(text, names)
    fix = (text, near) if near else None
    hint = did_you_mean(text, names) or shipped
    raise NotFoundError(Problem(f"no recipe {text!r}", hint=hint, fix=fix))


def find_part(name: str, folders: list[Path]) -> Path | None:
    """Return the file of a part or recipe by its name in `defaults` (`actor/dp_actor`), or None."""
    for base in folders:
        path = base / f"{name.removesuffix('.yaml')}.yaml"
        if path.is_file():
            return path.resolve()
    return None


def level_of(path: Path) -> Literal[1, 2]:
    """Return 1 for a shipped base or part, 2 for any other file."""
    in_library = path.is_relative_to(LIBRARY)
    is_base = path.parent != LIBRARY or path.stem.endswith("_trainer")
    if in_library and is_base:
        return 1
    return 2


def search_folders(primary: Source, extra: list[Path]) -> list[Path]:
    """Return the folders to search for parts: the recipe's folder, search paths, the library.

    The search paths are `extra`, then the recipe's and those of the recipes that it includes.
    Raises ConfigError if a recipe includes itself.
    """
    folders: list[Path] = []

    def add(paths: list[Path]) -> None:
        folders.extend(path for path in paths if path not in folders)

    def visit(source: Source, trail: list[Path]) -> None:
        if source.path in trail:
            circle = [*trail[trail.index(source.path) :], source.path]
            raise ConfigError(
                f"a recipe includes itself: {' -> '.join(map(shown, circle))}",
                where=source.where("defaults"),
                hint="remove one of these from `defaults`",
            )
        where = source.where("hydra.searchpath")
        known = dialects() if source.searchpath else []
        entries = [
            entry
            for entry in source.searchpath
            if not any(dialect.is_library(entry) for dialect in known)
        ]
        add([resolve_folder(entry, source.path.parent, where) for entry in entries])
        for entry in source.defaults:
            if not isinstance(entry, str) or entry == "_self_":
                continue
            if ".." in entry.split("/"):
                raise ConfigError(
                    f"`..` is not allowed in a defaults list: {entry}",
                    where=source.where("defaults"),
                    hint=PARENT_HINT,
                )
            found = find_part(entry.partition("@")[0].lstrip("/"), [*folders, LIBRARY])
            if found is None:
                for dialect in dialects():
                    dialect.check_part(entry.partition("@")[0].rpartition("/")[2], entry)
            else:
                visit(read(found), [*trail, source.path])

    add([primary.path.parent, *extra])
    visit(primary, [])
    add([LIBRARY])
    return folders


def resolve_folder(entry: str, base: Path, where: str) -> Path:
    """Return the folder of one search path entry, relative to `base`.

    Accepts `file://DIR`, `pkg://package` or DIR, and expands `${oc.env:X}` and `~`. Raises
    ConfigError at `where`.
    """
    text = _ENV.sub(lambda match: _environment(match, where), entry)
    if "://" not in text:
        text = f"file://{text}"
    scheme, _, rest = text.partition("://")
    if scheme == "pkg":
        spec = find_spec(rest)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"the search path {entry} names no importable package", where=where)
        return Path(next(iter(spec.submodule_search_locations)))
    if scheme != "file":
        message = f"the search path {entry} has an unknown scheme"
        raise ConfigError(message, where=where, hint="use file://DIR or pkg://package")
    path = (base / Path(rest).expanduser()).resolve()
    if not path.is_dir():
        message = f"the search path {entry} is not a folder"
        raise ConfigError(message, where=where, hint=f"it resolves to {path}")
    return path


def _environment(match: re.Match[str], where: str) -> str:
    """Return the value of an environment variable in a search path, or its default."""
    name, default = match.group(1, 2)
    if name in os.environ:
        return os.environ[name]
    if default is None:
        message = f"the environment variable {name} is not set"
        raise ConfigError(message, where=where, hint=f"export {name}=…")
    return default


def place(where: str) -> str:
    """Return where a setting was made for a table: a shipped recipe by its name, not its folder."""
    if where.startswith("override "):
        return "command line"
    folder = f"{LIBRARY}/"
    if where.startswith(folder):
        return f"recipes/{where.removeprefix(folder)}"
    return where
