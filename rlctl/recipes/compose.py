"""Composition of a recipe, its parts and the command line into one validated configuration.

Hydra provides defaults lists with groups and packages, the override grammar and interpolation.
rlctl reads the files itself instead of through Hydra's config sources, so that every value keeps
its line, any recipe may set a search path, and no global state is created.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import (
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes.dialects import Translators
from rlctl.recipes.implied import apply_implied
from rlctl.recipes.keys import schema_keys, without_empty_text
from rlctl.recipes.layers import MISSING, Layers, Origin, Recipe, UnusedKey, leaves, nested
from rlctl.recipes.overrides import parse, search_path_override, sort_overrides
from rlctl.recipes.plugin_params import check_plugins
from rlctl.recipes.recorded import recorded, recorded_origins
from rlctl.recipes.search_path import (
    find_recipe,
    level_of,
    library_recipes,
    search_folders,
)
from rlctl.recipes.slots import lookup
from rlctl.recipes.validate import load_config, unresolved, validate
from rlctl.recipes.yaml_repository import YamlRepository
from rlctl.recipes.yaml_sources import Source, read
from rlctl.redaction import redact

_MENTIONED = re.compile(r"[\w.]+")

__all__ = ["Origin", "Recipe", "base_settings", "compose", "compose_unvalidated", "load_config"]


def compose(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Compose a shipped recipe (by name) or a file, with overrides in Hydra's grammar.

    Raises NotFoundError for an unknown recipe and ConfigError with all problems at once: unknown
    keys, wrong types, bounds, missing values, missing parts, overrides that cannot be parsed.
    """
    path = find_recipe(recipe)
    layers, files = _merge(path, overrides)
    implied = apply_implied(layers)
    container = _resolve(layers)
    problems = check_plugins(container, layers)
    shown = recorded(container, layers.tree)  # registers secrets before any problem is described
    config, invalid = validate(container, layers.origins, layers.faulty, leaves(layers.tree))
    refused = [each for found in layers.translators for each in found.problems(container)]
    problems = [*layers.problems, *refused, *invalid, *problems]
    if problems or config is None:
        raise ConfigError(*problems)
    notices = [line for found in layers.translators for line in found.notices()]
    foreign = layers.translators.settings()
    return Recipe(
        path.stem,
        path,
        config,
        container,
        shown,
        recorded_origins(layers.origins),
        [redact(line) for line in (*notices, *implied)],
        [(source.path, package) for source, package in files],
        [
            UnusedKey(setting.key, setting.where, setting.text)
            for setting in foreign
            if setting.kind == "unused"
        ],
        foreign,
    )


def compose_unvalidated(recipe: str | Path) -> dict[str, Any]:
    """Return the values of a recipe that may be incomplete, with `???` for missing values.

    Interpolations of missing values and of the environment are left as written.
    """
    layers, _ = _merge(find_recipe(recipe), ())
    return recorded(_resolve(layers), layers.tree)


def resolved_section(container: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a stored configuration with its values from the environment.

    Messages do not show these from now on. Raises ConfigError where a variable is not set.
    """
    try:
        section = OmegaConf.select(OmegaConf.create(dict(container)), name)
        resolved: Any = OmegaConf.to_container(section, resolve=True)
    except OmegaConfBaseException as error:
        message, where, hint = unresolved(name, str(error), "config.yaml")
        raise ConfigError(message, where=where, hint=hint) from error
    recorded(resolved, container[name])
    return resolved


def base_settings() -> dict[str, Origin]:
    """Return each key of the PPO base: its default as written (`???` = required), and origin."""
    layers, _ = _merge(find_recipe("ppo_trainer"), ())
    return {key: chain[-1] for key, chain in layers.origins.items()}


def _merge(path: Path, overrides: Sequence[str]) -> tuple[Layers, list[tuple[Source, str]]]:
    """Merge all files and settings. Returns the layers and the files with packages, lowest first.

    Raises the errors that make composition impossible; others are collected in the layers.
    """
    parsed, problems = parse(overrides)
    try:
        primary = read(path)
        folders = search_folders(primary, search_path_override(parsed))
        repository = YamlRepository(primary, folders)
        choices = sort_overrides(parsed, repository)
        problems += choices.problems
        files = repository.files(choices.parts)
        if not any(level_of(source.path) == 1 for source, _ in files):
            raise ConfigError(
                "this recipe does not include a base",
                where=f"{primary.name}:1",
                hint="start it with `defaults: [ppo_trainer, _self_]`: the base has all defaults",
            )
    except RlctlError as error:
        raise type(error)(*problems, *error.problems) from error
    shipped = {path: name for name, path in library_recipes().items()}
    bases = [shipped[source.path] for source, _ in files if source.path in shipped]
    layers = Layers(problems=problems, translators=Translators(bases))
    for source, package in files:
        layers.add_file(source, package, level_of(source.path))
    for setting in choices.settings:
        layers.add_setting(setting)
    return layers, files


def _resolve(layers: Layers) -> dict[str, Any]:
    """Resolve interpolations. Missing values and broken references become problems."""
    _replace_malformed(layers)
    for name, value in leaves(layers.tree).items():
        if value == MISSING:
            help_text = schema_keys()[name].help if name in schema_keys() else ""
            where = _where(layers, name)
            layers.add_problem(name, f"{name} is not set", where, f"pass {name}=… ({help_text})")
    try:
        return _without_empty_texts(_resolved(layers.tree), layers)
    except OmegaConfBaseException:
        pass
    config = OmegaConf.create(layers.tree)
    for name, written in leaves(layers.tree).items():
        if any(f"${{{other}}}" in str(written) for other in layers.faulty):
            layers.faulty.add(name)  # the problem is reported at the key that it refers to
            continue
        where = _where(layers, name)
        try:
            value = OmegaConf.select(config, name, throw_on_missing=True)
            if OmegaConf.is_config(value):  # a list, whose elements may be interpolations
                value = OmegaConf.to_container(value, resolve=True)
        except (InterpolationToMissingValueError, MissingMandatoryValue):
            layers.faulty.add(name)
        except OmegaConfBaseException as error:
            layers.add_problem(name, *unresolved(name, str(error), where))
        else:
            OmegaConf.update(config, name, value, merge=False)
    unresolved_tree: Any = OmegaConf.to_container(config, resolve=False)
    return _without_empty_texts(unresolved_tree, layers)


def _without_empty_texts(container: dict[str, Any], layers: Layers) -> dict[str, Any]:
    """Replace `''`, to which an interpolation of a nullable key resolves, by null, in place."""
    for name, written in leaves(layers.tree).items():
        section, _, leaf = name.rpartition(".")
        if "$" in str(written) and isinstance(node := lookup(container, section), dict):
            node[leaf] = without_empty_text(name, node.get(leaf))
    return container


def _resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the tree with its interpolations resolved. Raises OmegaConf's errors.

    OmegaConf spends 0.1 ms on each value, so it gets only those with an interpolation and those
    that they mention.
    """
    values = leaves(tree)
    written = {name: value for name, value in values.items() if "$" in str(value)}
    text = " ".join(map(str, written.values()))
    names = [name.strip(".") for name in _MENTIONED.findall(text)]
    mentioned = {
        name: value
        for name, value in values.items()
        if name in written
        or any(
            f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}.") for other in names
        )
    }
    # Relative references, defaults of missing keys, and keys with dots need all values.
    whole = "${." in text or "oc.select" in text or nested(values) != tree
    config = OmegaConf.create(tree if whole else nested(mentioned))
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    if whole:
        return resolved
    return nested(deepcopy(values) | {name: lookup(resolved, name) for name in written})


def _where(layers: Layers, name: str) -> str:
    """Return where a value, or the mapping that it was copied with, was last set."""
    while name not in layers.origins:
        name = name.rpartition(".")[0]
    return layers.origins[name][-1].where


def _replace_malformed(layers: Layers) -> None:
    """Replace each interpolation that OmegaConf cannot parse by null, and add its problem."""
    values = leaves(layers.tree)
    for name, value in values.items():
        if "$" not in str(value):
            continue
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException as error:
            where = _where(layers, name)
            reason = str(error).strip().splitlines()[0]
            layers.add_problem(
                name,
                f"{name} has a malformed interpolation {value!r}: {reason}",
                where,
                "write ${other.key} or ${oc.env:NAME,default}",
            )
            values[name] = None
    if any(name in layers.faulty for name in values):
        layers.tree = nested(values)
