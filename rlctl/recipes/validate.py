"""Validation of a composed configuration: problems name the key, the value and its place."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from rlctl.errors import ConfigError, Problem
from rlctl.recipes.keys import Key, known_key, schema_keys
from rlctl.recipes.layers import Origin
from rlctl.recipes.schema import Config
from rlctl.recipes.slots import lookup
from rlctl.suggest import closest, did_you_mean, override_fix

_BOOLEANS = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
# Of `Key.type`: inclusive bounds only, next to which every value is valid.
_BOUNDED = re.compile(
    r"(?:whole )?number(?: ≥ (?P<low>[\d.]+))?(?: and)?(?: ≤ (?P<high>[\d.]+))?(?: or null)?"
)
_LIMITS = (("low", "-inf"), ("high", "inf"))


def validate(
    container: dict[str, Any],
    origins: Mapping[str, list[Origin]],
    faulty: Collection[str] = (),
    written: Mapping[str, Any] | None = None,
) -> tuple[Config | None, list[Problem]]:
    """Validate a resolved container. Returns the config, or None and the problems, one per key.

    Keys in `faulty` have a problem already and are skipped, as are keys whose value as `written`
    is a reference to a wrong one.
    """
    problems = [
        problem
        for key in schema_keys().values()
        if (problem := _text_none(key, container, origins.get(key.name, [])))
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
            section, _, leaf = name.rpartition(".")
            if item["type"] == "missing" and item["loc"][-1] == leaf:
                missing.setdefault(section, []).append(leaf)
            else:
                found.setdefault(name, _problem(name, container, origins))
        problems += [_incomplete(section, names, origins) for section, names in missing.items()]
        references = [f"${{{name}}}" for name in found]
        problems += [
            problem
            for name, problem in found.items()
            if (written or {}).get(name) not in references
        ]
    return (None if problems else config), problems


def load_config(container: dict[str, Any]) -> Config:
    """Validate a container that was composed earlier. Raises ConfigError with all problems."""
    config, problems = validate(container, {})
    if config is None:
        raise ConfigError(*problems)
    return config


def _key_of(loc: tuple[int | str, ...]) -> str:
    """Return the key of a pydantic location, without indices and names of union branches.

    For an unknown key of a section, this is the first unknown prefix.
    """
    name = ""
    for part in loc:
        longer = f"{name}.{part}".removeprefix(".")
        if known_key(longer) is None:
            above = schema_keys().get(name)
            if above is None or above.kind == "section":
                return longer
            return name
        name = longer
    return name


def _problem(name: str, container: dict[str, Any], origins: Mapping[str, list[Origin]]) -> Problem:
    """Return the problem of one key: unknown, or of the wrong type or out of bounds."""
    chain = origins.get(name, [])
    where = chain[-1].where if chain else None
    key = known_key(name)
    if key is None:
        return Problem(f"unknown key {name}", where, did_you_mean(name, schema_keys()))
    value = lookup(container, name)
    expected = key.type
    if key.name != name:
        expected = expected.removeprefix("mapping of ")
    if isinstance(value, int) and abs(value) >= 2**63:
        expected += " of at most 64 bits"
    if expected.startswith(("whole number", "number", "list", "mapping")):
        expected = f"a {expected}"
    hint = key.help or None
    if isinstance(value, float) and value.is_integer() and "whole number" in key.type:
        hint = f"write {int(value)}"
    fix = override_fix(where, value=_valid_near(key, value))
    return Problem(f"{name} should be {expected}, not {_as_yaml(value)}", where, hint, fix)


def _valid_near(key: Key, value: object) -> str | None:
    """Return the valid value that was meant by a wrong one; None if it is not obvious."""
    if key.choices:
        word = {"gpu": "cuda"}.get(str(value).lower(), str(value).lower())
        near = _BOOLEANS.get(word) or closest(word, key.choices)
        if near not in key.choices:
            return None
        return near
    match = _BOUNDED.fullmatch(key.type)
    if match is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    low, high = (float(match[name] or default) for name, default in _LIMITS)
    clamped = max(low, min(high, value))
    if (isinstance(value, int) and clamped == value) or not math.isfinite(clamped):
        return None
    if "whole" not in key.type:
        return f"{clamped:g}"
    if clamped != int(clamped):
        return None
    return str(int(clamped))


def _as_yaml(value: object) -> str:
    """Return a value as YAML writes it."""
    return "null" if value is None else repr(value)


def _incomplete(section: str, names: list[str], origins: Mapping[str, list[Origin]]) -> Problem:
    """Return the problem of a section in which the part chosen for it leaves keys unset."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    present = [chain[0] for key, chain in origins.items() if key.startswith(f"{section}.")]
    # the shipped parts (level 1) are complete, so a file of the user is named first
    present.sort(key=lambda origin: origin.level == 1)
    return Problem(
        f"{section or 'the configuration'} lacks {', '.join(names[:4])}{more}",
        present[0].where.rpartition(":")[0] if present else None,
        "a part sets every key of its section; include the shipped one, such as "
        "`defaults: [adamw, _self_]`",
        code="E-WRONG-VALUE",
    )


def _text_none(key: Key, container: dict[str, Any], chain: list[Origin]) -> Problem | None:
    """Return a problem if a nullable text key has the text `None`, where YAML writes `null`."""
    if (
        key.nullable
        and "text" in key.type
        and lookup(container, key.name) in ("None", "none", "NULL")
    ):
        where = chain[-1].where if chain else None
        return Problem(f"{key.name} is the text 'None'", where, f"write {key.name}=null")
    return None


def unresolved(name: str, reason: str, where: str) -> tuple[str, str, str | None]:
    """Return message, place and hint for an interpolation that cannot be resolved."""
    if match := re.search(r"Environment variable '(\w+)' not found", reason):
        message = f"the environment variable {match[1]} is not set ({name} needs it)"
        return message, where, f"export {match[1]}=…"
    if match := re.search(r"Interpolation key '([\w.]+)' not found", reason):
        message = f"{name} refers to {match[1]}, which does not exist"
        return message, where, did_you_mean(match[1], schema_keys())
    hint = "write ${other.key} or ${oc.env:NAME,default}"
    return f"{name} cannot be resolved: {reason.splitlines()[0]}", where, hint
