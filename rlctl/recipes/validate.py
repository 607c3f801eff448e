"""The verdict on a composed configuration: types and bounds by pydantic, in words that name key, value and place."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from rlctl.errors import ConfigError, Problem
from rlctl.recipes.keys import Key, known_key, schema_keys
from rlctl.recipes.layers import Origin
from rlctl.recipes.schema import Config
from rlctl.suggest import did_you_mean


def validate(
    container: dict[str, Any], origins: Mapping[str, list[Origin]], faulty: Collection[str] = ()
) -> tuple[Config | None, list[Problem]]:
    """Validate a resolved container. Returns the config, or None and every problem, one a key; of `faulty` keys nothing more is said."""
    problems = [
        problem
        for key in schema_keys().values()
        if (problem := _written_null(key, container, origins.get(key.name, [])))
    ]
    config: Config | None = None
    missing: dict[str, list[str]] = {}
    try:
        config = Config.model_validate(container)
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for item in error.errors(include_url=False, include_context=False):
            name = _key_of(item["loc"])
            if any(
                name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
                for other in faulty
            ):
                continue
            if item["type"] == "missing":
                section, _, leaf = name.rpartition(".")
                missing.setdefault(section, []).append(leaf)
            else:
                found.setdefault(name, _problem(name, container, origins))
        problems += [_incomplete(section, names, origins) for section, names in missing.items()]
        problems += found.values()
    return (None if problems else config), problems


def load_config(container: dict[str, Any]) -> Config:
    """Validate a plain dict that was composed earlier (a run's config.yaml). Raises ConfigError with all problems."""
    config, problems = validate(container, {})
    if config is None:
        raise ConfigError(*problems)
    return config


def _key_of(loc: tuple[int | str, ...]) -> str:
    """pydantic's location without indices and names of union branches: the longest prefix that is a key, or one beyond a section."""
    name = ""
    for part in loc:
        longer = f"{name}.{part}" if name else str(part)
        if known_key(longer) is None:
            above = schema_keys().get(name)
            return longer if above is None or above.kind == "section" else name
        name = longer
    return name


def _problem(name: str, container: dict[str, Any], origins: Mapping[str, list[Origin]]) -> Problem:
    chain = origins.get(name, [])
    where = chain[-1].where if chain else None
    key = known_key(name)
    if key is None:
        return Problem(f"unknown key {name}", where, did_you_mean(name, schema_keys()))
    value = lookup(container, name)
    expected = key.type if key.name == name else key.type.removeprefix("mapping of ")
    whole = isinstance(value, float) and value.is_integer() and "whole number" in key.type
    return Problem(
        f"{name} should be {expected}, not {_written(value)}",
        where,
        f"write {int(value)}" if whole else key.help or None,
    )


def _written(value: object) -> str:
    """As YAML has it: `None` is what nobody wrote."""
    return "null" if value is None else repr(value)


def _incomplete(section: str, names: list[str], origins: Mapping[str, list[Origin]]) -> Problem:
    """A part that took another's place sets only some of the section's keys, or a recipe is not built on the base."""
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    there = [chain[0] for key, chain in origins.items() if key.startswith(f"{section}.")]
    beside = next(
        (each.where for each in sorted(there, key=lambda each: each.level == 1)), None
    )  # ours are complete
    hint = "a part sets every key of its section; let it begin with the shipped one: `defaults: [adamw, _self_]`, say"
    return Problem(
        f"{section or 'the configuration'} lacks {some}",
        beside.rpartition(":")[0] if beside else None,
        hint,
    )


def _written_null(key: Key, container: dict[str, Any], chain: list[Origin]) -> Problem | None:
    """`None` in a key that may be null is Python's word for it, not a name: YAML says null."""
    if (
        key.nullable
        and "text" in key.type
        and lookup(container, key.name) in ("None", "none", "NULL")
    ):
        return Problem(
            f"{key.name} is the text 'None'",
            chain[-1].where if chain else None,
            f"write {key.name}=null",
        )
    return None


def lookup(container: Any, name: str) -> Any:
    """The value of a dotted key, or None where there is none."""
    for part in name.split("."):
        container = container.get(part) if isinstance(container, dict) else None
    return container


def dangling(name: str, reason: str, where: str) -> tuple[str, str, str | None]:
    """Message, place and help for an interpolation that points nowhere."""
    if match := re.search(r"Environment variable '(\w+)' not found", reason):
        return (
            f"the environment variable {match[1]} is not set ({name} needs it)",
            where,
            f"export {match[1]}=…",
        )
    if match := re.search(r"Interpolation key '([\w.]+)' not found", reason):
        return (
            f"{name} refers to {match[1]}, which does not exist",
            where,
            did_you_mean(match[1], schema_keys()),
        )
    return f"{name} cannot be resolved: {reason.splitlines()[0]}", where, None
