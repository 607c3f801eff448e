"""Names and settings of plug-ins, validated against the plug-ins that a configuration selects."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from rlctl import plugins
from rlctl.errors import ConfigError, MissingExtraError, Problem, RlctlError
from rlctl.recipes.keys import Key, model_keys
from rlctl.recipes.layers import Layers, Origin
from rlctl.recipes.slots import SLOTS, Slot
from rlctl.suggest import closest, override_fix


def check_plugins(container: dict[str, Any], layers: Layers) -> list[Problem]:
    """Return the problems of the plug-ins' names and settings.

    Removes settings of plug-ins that are not selected from `container` if verl's flat keys or a
    lower layer set them, and notes the flat ones as unused keys. Loads a plug-in only if it has
    settings and is not user code: for user code, which another process imports, settings of the
    layers below its selection are those of another plug-in. Settings of a plug-in whose package is
    missing are not checked.
    """
    problems: list[Problem] = []
    for slot in SLOTS:
        problems += _unknown_names(slot, container, layers)
        for name, section, values in list(slot.settings(container)):
            try:
                problems += _check_settings(slot, name, section, values, container, layers)
            except MissingExtraError:
                continue  # reported by the plan, with all other missing packages
            except RlctlError as error:
                where = layers.origins[slot.key][-1].where
                problems += [
                    dataclasses.replace(problem, where=problem.where or where)
                    for problem in error.problems
                ]
    return list(dict.fromkeys(problems))


def plugin_keys(slot: Slot, name: str) -> list[Key]:
    """Return the settings of a plug-in as keys below its section. Loads the plug-in.

    Raises the errors of `plugins.load`.
    """
    section = slot.section(name)
    model = plugins.params_model(_load(slot, name))
    if model is None or section is None:
        return []
    return list(model_keys(model, f"{section}."))


def _unknown_names(slot: Slot, container: dict[str, Any], layers: Layers) -> list[Problem]:
    """Return problems for names, other than defaults, that are neither known nor `module:Name`."""
    chain = layers.origins.get(slot.key)
    if not chain or chain[-1].value == chain[0].value or slot.key in layers.faulty:
        return []
    problems: list[Problem] = []
    for name in slot.selected(container):
        if ":" not in name and name not in accepted_names(slot.kind):
            try:
                plugins.load(slot.kind, name)
            except ConfigError as error:
                where = chain[-1].where
                fix = None
                if near := closest(name, known_names(slot.kind)):
                    fix = override_fix(where, value=where.partition("=")[2].replace(name, near))
                problems += [
                    dataclasses.replace(problem, where=where, fix=fix) for problem in error.problems
                ]
    return problems


def _check_settings(
    slot: Slot,
    name: str,
    section: str,
    values: dict[str, Any],
    container: dict[str, Any],
    layers: Layers,
) -> list[Problem]:
    selected = slot.selected(container)
    if slot.keywords and name in [full.rpartition(":")[2] for full in selected if ":" in full]:
        return []
    accepted: set[str] = set()
    is_checked = name in selected and slot.is_loaded_here(name)
    if is_checked:
        if ":" not in name and name not in accepted_names(slot.kind):
            return []  # reported already
        model = plugins.params_model(_load(slot, name))
        if model is not None:
            accepted = set(model.model_fields)
    problems: list[Problem] = []
    for field in [field for field in values if field not in accepted]:
        key = f"{section}.{field}"
        origin = _origin(key, layers)
        flat = next((path for path in layers.flat if f"{path}.".startswith(f"{key}.")), None)
        if flat is not None:
            place = layers.origins[slot.key][-1]
            selection = f"{slot.key} is {', '.join(selected)}"
            if place.level > 1:
                selection += f" ({place.where})"
            layers.translators.add_unused(layers.flat[flat], origin.value, origin.where, selection)
        elif origin.level >= layers.origins[slot.key][-1].level and name not in selected:
            message = f"{key} is set, but {slot.key} is {', '.join(selected)}"
            problems.append(Problem(message, origin.where, f"add {name} to {slot.key}"))
            continue
        elif origin.level >= layers.origins[slot.key][-1].level:
            continue  # reported by parse_params, here or in the process that imports the plug-in
        layers.remove((*section.split("."), field), container)
    if not is_checked:
        return problems
    try:
        plugins.parse_params(_load(slot, name), name, values, section)
    except ConfigError as error:
        for problem in error.problems:
            key = problem.where
            if key in (None, section):
                key = f"{section}.{next(iter(values))}"
            problems.append(
                dataclasses.replace(problem, where=_origin(key or section, layers).where)
            )
    return problems


def _origin(key: str, layers: Layers) -> Origin:
    """Return the newest setting of a key, or of a key below it, or of the section above it."""
    while key:
        for name in (key, *(other for other in layers.origins if other.startswith(f"{key}."))):
            if name in layers.origins:
                return layers.origins[name][-1]
        key = key.rpartition(".")[0]
    raise KeyError(key)


@cache
def known_names(kind: str) -> list[str]:
    """Return the entry points of `kind`, read once per process."""
    return plugins.names(kind)


@cache
def accepted_names(kind: str) -> list[str]:
    """Return the entry points of `kind` and their other names, read once per process."""
    return [*known_names(kind), *plugins.names(f"other_names.{kind}")]


@cache
def _load(slot: Slot, name: str) -> Any:
    return plugins.load(slot.kind, name)
