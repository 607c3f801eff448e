"""Completion of recipes, keys and overrides. Imports neither Hydra nor other slow modules.

Only the settings of a plug-in need a slow import: that of the plug-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.recipes.keys import Key, schema_keys
from rlctl.recipes.plugin_params import known_names, plugin_keys
from rlctl.recipes.search_path import LIBRARY, library_recipes
from rlctl.recipes.slots import Slot, slot_of, slot_with_setting
from rlctl.recipes.yaml_sources import read


def complete_override(incomplete: str, given: Sequence[str] = ()) -> list[str]:
    """Return completions of a partial override, one section at a time, then values of the key.

    `tr` gives `trainer.`, `trainer.device=` gives its values. A leading `+` or `++` is kept.
    `given` are the other overrides of the command line, which may select a plug-in.
    """
    bare = incomplete.lstrip("+")
    sign = incomplete[: len(incomplete) - len(bare)]
    key, equals, value = bare.partition("=")
    if equals:
        values = _values(key, value, given)
        return [f"{sign}{key}={choice}" for choice in values if choice.startswith(value)]
    slot = slot_with_setting(key)
    if slot is not None:
        return [f"{sign}{name}" for name in _settings(slot, key, given)]
    depth = key.count(".")
    entries = [
        entry
        for name, entry in schema_keys().items()
        if name.startswith(key) and name.count(".") == depth
    ]
    return [f"{sign}{_with_end(entry)}" for entry in entries]


def _with_end(entry: Key) -> str:
    if entry.kind == "value":
        return f"{entry.name}="
    return f"{entry.name}."


def complete_key(incomplete: str) -> list[str]:
    """Return full keys that start with `incomplete`, or whose last part does."""
    keys = [name for name, entry in schema_keys().items() if entry.kind != "section"]
    return [name for name in keys if name.startswith(incomplete)] or [
        key for key in keys if key.rpartition(".")[2].startswith(incomplete)
    ]


def complete_recipe(incomplete: str) -> list[str]:
    """Return names of shipped recipes, and YAML files and folders at a partial path."""
    shipped = [
        name
        for name in library_recipes()
        if name.startswith(incomplete) and not name.endswith("_trainer")
    ]
    head, slash, start = incomplete.rpartition("/")
    folder = Path(f"{head}{slash}").expanduser()
    entries = [
        entry
        for entry in sorted(folder.glob("*"))
        if entry.name.startswith(start) and (start or not entry.name.startswith("."))
    ]
    files = [f"{head}{slash}{entry.name}" for entry in entries if entry.suffix in (".yaml", ".yml")]
    if not slash and not start:
        return shipped + files
    folders = [f"{head}{slash}{entry.name}/" for entry in entries if entry.is_dir()]
    return shipped + files + folders


def _values(key: str, partial: str, given: Sequence[str]) -> list[str]:
    """Return values of a key: its choices, plug-ins, null. In a list, those after the comma."""
    entry = schema_keys().get(key)
    slot = slot_of(key)
    if entry is None and (setting := slot_with_setting(key)) is not None:
        matches = _plugin_keys(setting, key, given)
        entry = next((match for match in matches if match.name == key), None)
    if entry is None:
        return []
    choices = list(entry.choices)
    if slot is not None:
        choices = known_names(slot.kind)
    if partial.startswith("["):
        head = partial[: max(partial.rfind(","), 0) + 1]
        taken = partial[1:].split(",")[:-1]
        return [f"{head}{choice}" for choice in choices if choice not in taken]
    # As the only completion, a shell would insert null.
    if entry.nullable and (choices or partial):
        return [*choices, "null"]
    return choices


def _settings(slot: Slot, key: str, given: Sequence[str]) -> list[str]:
    """Return completions of a key in the settings of the selected plug-ins."""
    names = [f"{entry.name}=" for entry in _plugin_keys(slot, key, given)]
    if slot.several and key.count(".") == f"{slot.params}.".count("."):
        names = [f"{slot.params}.{name}." for name in _selected(slot, given)]
    return [name for name in names if name.startswith(key)]


def _plugin_keys(slot: Slot, key: str, given: Sequence[str]) -> list[Key]:
    """Return the settings of the selected plug-ins, of one plug-in if `key` names it."""
    found: list[Key] = []
    for name in _selected(slot, given):
        if not slot.several or key.startswith(f"{slot.params}.{name}."):
            try:
                found += plugin_keys(slot, name)
            except RlctlError:  # an unknown name, or a missing package
                continue
    return found


def _selected(slot: Slot, given: Sequence[str]) -> list[str]:
    """Return the plug-ins that the command line selects, or else those of the base."""
    for text in reversed(given):
        key, equals, value = text.lstrip("+").partition("=")
        if key == slot.key and equals:
            return [name.strip("'\" ") for name in value.strip("[]").split(",")]
    tree: dict[str, Any] = {}
    for entry in read(LIBRARY / "ppo_trainer.yaml").defaults:
        if not isinstance(entry, dict):
            continue
        for group, part in entry.items():
            folder, _, package = group.partition("@")
            section = tree
            for name in (package or folder).split("."):
                section = section.setdefault(name, {})
            section.update(read(LIBRARY / folder / f"{part}.yaml").data)
    return slot.selected(tree)
