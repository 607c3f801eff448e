"""Report of keys that were set and have no effect, with the reasons."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from rlctl import plugins
from rlctl.errors import Problem, RlctlError, raise_problems
from rlctl.recipes.keys import known_key
from rlctl.recipes.layers import Origin, Recipe, UnusedKey
from rlctl.recipes.role_table import ROLES
from rlctl.recipes.slots import SLOTS, Slot, lookup
from rlctl.recipes.validate import load_config

_TURNS = "actor_rollout_ref.rollout.multi_turn.enable"
_OF_TURNS = ("generators", "tool_parsers")

Origins = Mapping[str, Sequence[Origin]]
Declared = tuple[str, str, plugins.Unused]  # selecting key, pattern of keys, reason


def report_unused_keys(recipe: Recipe, roles: Collection[str] | None, *, strict: bool) -> list[str]:
    """Return one line per key that was set and has no effect.

    `roles` are the roles that the run builds, or None if they are not known. Raises ConfigError
    with all of the keys if `strict`.
    """
    unused = [*recipe.unused, *unused_keys(recipe.container, recipe.origins, roles)]
    if strict:
        hint = "remove it, or omit --strict"
        raise_problems([Problem(str(key), key.where, hint) for key in unused])
    return [str(key) for key in unused]


def unused_keys(
    container: Mapping[str, Any],
    origins: Origins,
    roles: Collection[str] | None = None,
    keys: Collection[str] | None = None,
) -> list[UnusedKey]:
    """Return the keys that a recipe or the command line set and that have no effect.

    A key is not reported if its cause is of a higher level: a switch on the command line may
    disable settings of a recipe. `roles` are the roles that the run builds besides the actor; with
    None, roles are not considered. `keys` limits the report to these keys.
    """
    found: list[UnusedKey] = []
    declared: list[Declared] | None = None
    for key, chain in origins.items():
        setting = chain[-1]
        if setting.level == 1 or (keys is not None and key not in keys):
            continue
        if declared is None:
            declared = list(_declared_by_plugins(container))
        reasons = [
            *_reasons(key, container, origins, roles),
            *_plugin_reasons(key, container, origins, declared),
        ]
        for causes, reason in reasons:
            if setting.level >= max(_level(cause, origins) for cause in causes):
                found.append(UnusedKey(key, setting.where, reason))
                break
    return found


def _reasons(
    key: str, container: Mapping[str, Any], origins: Origins, roles: Collection[str] | None
) -> Iterator[tuple[Sequence[str], str]]:
    """Yield why a key has no effect by the schema and roles, each with the keys that cause it."""
    for role in ROLES:
        if roles is None or role.name in roles:
            continue
        if any(fnmatchcase(key, pattern) for pattern in role.unused_keys):
            named = [
                _describe(cause, container, origins)
                for cause in role.decided_by
                if lookup(container, cause) is not True
            ]
            yield role.decided_by, f"no {role.name} is built ({', '.join(named)})"
    if (known := known_key(key)) is None:
        return
    for condition in known.unused_if:
        if condition.holds(partial(lookup, container)):
            causes = condition.causes
            yield causes, " and ".join(_describe(cause, container, origins) for cause in causes)


def _plugin_reasons(
    key: str, container: Mapping[str, Any], origins: Origins, declared: Sequence[Declared]
) -> Iterator[tuple[Sequence[str], str]]:
    """Yield the reasons that plug-ins declare, each with the keys that cause it."""
    for selecting, pattern, unused in declared:
        if fnmatchcase(key, pattern):
            selection = _describe(selecting, container, origins)
            if unused.reason:
                selection += f": {unused.reason}"
            yield (selecting, *unused.causes), selection


def _declared_by_plugins(container: Mapping[str, Any]) -> Iterator[Declared]:
    """Yield the keys that selected plug-ins do not use; one that another leaves out is not asked.

    Yields nothing for an incomplete configuration or for plug-ins that cannot be loaded: these are
    reported elsewhere.
    """
    with suppress(RlctlError):
        config = load_config(dict(container))
        found: list[str] = []
        for slot in SLOTS:
            if any(fnmatchcase(slot.key, pattern) for pattern in found):
                continue
            for name in filter(slot.is_loaded_here, _used(slot, container)):
                with suppress(RlctlError):
                    plugin = plugins.load(slot.kind, name)
                    for pattern, unused in plugins.unused_keys(plugin, config).items():
                        found.append(pattern)
                        yield slot.key, pattern, unused


def _used(slot: Slot, container: Mapping[str, Any]) -> list[str]:
    """Return the plug-ins of a slot that a run surely uses."""
    is_unused = slot.kind in _OF_TURNS and not lookup(container, _TURNS)
    if is_unused or lookup(container, slot.key) is None:
        return []
    return slot.selected(container)


def _describe(cause: str, container: Mapping[str, Any], origins: Origins) -> str:
    """Return `algorithm.use_kl_in_reward is false`, with the place where it was set."""
    value = lookup(container, cause)
    if value is None or isinstance(value, bool):
        value = json.dumps(value)
    place = f" ({origins[cause][-1].where})" if _level(cause, origins) > 1 else ""
    return f"{cause} is {value}{place}"


def _level(key: str, origins: Origins) -> int:
    chain = origins.get(key, ())
    return chain[-1].level if chain else 1
