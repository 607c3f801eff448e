"""The verdict on a composed configuration: types and bounds by pydantic, in words that name key, value and place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rlctl.errors import ConfigError, Problem
from rlctl.recipes.keys import Key, known_key, schema_keys
from rlctl.recipes.layers import Origin
from rlctl.recipes.schema import Config
from rlctl.recipes.suggest import did_you_mean, nearest


def judge(container: dict[str, Any], origins: Mapping[str, list[Origin]]) -> tuple[Config | None, list[Problem]]:
    """Validate a resolved container. Returns the config, or None and every problem, one a key."""
    nulls = [problem for name, key in schema_keys().items() if (problem := _written_null(key, container, origins.get(name, [])))]
    try:
        config = Config.model_validate(container)
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for item in error.errors(include_url=False, include_context=False):
            name = _key_of(item["loc"])
            found.setdefault(name, _problem(name, item["type"], container, origins))
        return None, [*nulls, *found.values()]
    return (None, nulls) if nulls else (config, [])


def load_config(container: dict[str, Any]) -> Config:
    """Validate a plain dict that was composed earlier (a run's config.yaml). Raises ConfigError with all problems."""
    config, problems = judge(container, {})
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


def _problem(name: str, kind: str, container: dict[str, Any], origins: Mapping[str, list[Origin]]) -> Problem:
    chain = origins.get(name, [])
    where = chain[-1].where if chain else None
    key = schema_keys().get(name)
    if key is None:
        return Problem(f"unknown key {name}", where, did_you_mean(name, schema_keys()))
    if kind == "missing":
        begin = "begin the recipe with `defaults: [ppo_trainer, _self_]`; it holds every default"
        return Problem(f"{name} is missing", where, begin)
    value = lookup(container, name)
    hint = None
    if key.choices and isinstance(value, str):
        near = nearest(value, key.choices, limit=1)
        hint = f"did you mean {near[0]}?" if near else None
    if hint is None and len(chain) > 1:
        hint = f"without this it is {chain[-2].value!r} ({chain[-2].where})"
    return Problem(f"{name} should be {key.type}, not {value!r}", where, hint or key.help or None)


def _written_null(key: Key, container: dict[str, Any], chain: list[Origin]) -> Problem | None:
    """`None` in a key that may be null is Python's word for it, not a name: YAML says null."""
    if key.nullable and "text" in key.type and lookup(container, key.name) in ("None", "none", "NULL"):
        return Problem(f"{key.name} is the text 'None'", chain[-1].where if chain else None, f"write {key.name}=null")
    return None


def lookup(container: Any, name: str) -> Any:
    """The value of a dotted key, or None where there is none."""
    for part in name.split("."):
        container = container.get(part) if isinstance(container, dict) else None
    return container
