"""Plug-ins: look-up by name, settings and unused keys.

A plug-in is named by an entry point of the group `rlctl.<kind>`, of rlctl or of any other installed
package, or by `module:Name`. The kinds are algorithms, advantages, policy_losses, kl_estimators,
rewards, engines, generators, environments, programs, tools, tool_parsers, loggers, samplers,
readers, datasets, dialects, roles and commands.

A plug-in (a class or a function) may have two attributes:

    Params               a subclass of `Params`: the settings that the plug-in accepts
    unused_keys          the config keys or patterns that the plug-in does not use, or a function of
                         the config that returns them. A mapping has reasons: a text, or `Unused` if
                         other keys decide; without one, being selected is the reason
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlctl.errors import ConfigError, RlctlError
from rlctl.errors import Problem as Problem

if TYPE_CHECKING:
    from rlctl.params import Params

P = TypeVar("P")


class CommandHelp(NamedTuple):
    """Help of a command in lists, its panel, and the command that follows it there."""

    help: str
    panel: str | None = None
    before: str | None = None


def __getattr__(name: str) -> Any:
    """Import `Params` when it is used: most worker processes start in half the time without it."""
    if name != "Params":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlctl.params import Params

    return Params


def declare(**attributes: Any) -> Callable[[P], P]:
    """Return a decorator that sets `attributes` on a plug-in, leaving out those that are None."""

    def set_attributes(plugin: P) -> P:
        for name, value in attributes.items():
            if value is not None:
                setattr(plugin, name, value)
        return plugin

    return set_attributes


def entry_points_of(kind: str) -> EntryPoints:
    """Return the entry points of `kind`, of all installed packages. Imports no plug-in."""
    return _entry_points_of(kind, tuple(sys.path))


def names(kind: str) -> list[str]:
    """Return the sorted names of the entry points of `kind`. Imports no plug-in."""
    return sorted({point.name for point in entry_points_of(kind)})


def packages(kind: str) -> dict[str, str]:
    """Return the names of `kind`, sorted, and the package of each. Imports no plug-in."""
    points = {point.name: point.dist.name if point.dist else "" for point in entry_points_of(kind)}
    return dict(sorted(points.items()))


def load(kind: str, name: str) -> Any:
    """Return the plug-in of `kind` (`rewards`, …) that an entry point or `module:Name` names.

    Entry points of `rlctl.other_names.<kind>` are accepted too, and not listed.
    Raises ConfigError for an unknown name or a module that does not import, with file:line of the
    cause, and MissingExtraError if the plug-in needs a package that is not installed.
    """
    if ":" in name:
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)  # at the end, so that its modules shadow nothing
        return _import(EntryPoint(name, name, f"rlctl.{kind}"))
    points = (*entry_points_of(kind), *entry_points_of(f"other_names.{kind}"))
    found = next((point for point in points if point.name == name), None)
    if found is None:
        from rlctl.plugins.faults import unknown_name

        raise unknown_name(kind, name)
    return _import(found)


def params_model(plugin: Any) -> type[Params] | None:
    """Return the class of the plug-in's settings, or None if it has no settings."""
    return getattr(plugin, "Params", None)


def parse_params(plugin: Any, name: str, values: Mapping[str, Any], key: str) -> Params | None:
    """Validate the settings `values` of the plug-in `name`, found at the config key `key`.

    Returns an instance of the plug-in's `Params`, or None for a plug-in without settings. Lists
    are accepted for tuples. Raises ConfigError with one problem per wrong field, at `key.field`.
    """
    model = params_model(plugin)
    if model is None:
        if values:
            message = f"{name} has no settings, given: {', '.join(values)}"
            raise ConfigError(message, where=key, hint="remove it")
        return None
    from pydantic import ValidationError

    try:
        # As JSON, so that the lists of YAML are valid tuples although the types are strict.
        return model.model_validate_json(json.dumps(dict(values), default=str))
    except ValidationError as error:
        from rlctl.plugins.faults import wrong_settings

        raise wrong_settings(model, name, key, error) from None


def load_with_params(kind: str, name: str, values: Mapping[str, Any], key: str) -> Any:
    """Load a plug-in and validate its settings `values`, found at the config key `key`.

    Returns the plug-in; one with settings as a partial that passes them as the argument `params`.
    """
    plugin = load(kind, name)
    params = parse_params(plugin, name, values, key)
    return plugin if params is None else partial(plugin, params=params)


@dataclass(frozen=True)
class Unused:
    """Reason why a plug-in does not use a key; `causes` are the keys that decide about it."""

    reason: str
    causes: tuple[str, ...] = ()


def unused_keys(plugin: Any, config: Any) -> dict[str, Unused]:
    """Return the config keys, or fnmatch patterns, that the plug-in does not use, with reasons."""
    declared: Any = getattr(plugin, "unused_keys", ())
    if callable(declared):
        declared = declared(config) or ()
    reasons = declared if isinstance(declared, Mapping) else dict.fromkeys(declared, "")
    return {
        key: reason if isinstance(reason, Unused) else Unused(reason)
        for key, reason in reasons.items()
    }


def suggestion(given: str, known: Sequence[str]) -> str:
    """Return `did you mean 'x'? known: …`, without the question if no known name is similar."""
    from rlctl.suggest import closest

    near = closest(given, known)
    listing = "known: " + (", ".join(sorted(known)) or "none")
    return f"did you mean {near!r}? {listing}" if near else listing


@cache
def _entry_points_of(kind: str, path: tuple[str, ...]) -> EntryPoints:
    points = _all_entry_points(path).select(group=f"rlctl.{kind}")
    return EntryPoints(point for point in points if not is_removed(point))


def is_removed(point: EntryPoint) -> bool:
    """Return True for a bundled plug-in whose folder in `rlctl/plugins` was deleted."""
    package, _, rest = point.value.partition(".plugins.")
    folder = os.path.join(__path__[0], rest.partition(".")[0])
    return package == "rlctl" and not os.path.exists(os.path.join(folder, "__init__.py"))


@cache
def _all_entry_points(path: tuple[str, ...]) -> Any:
    """Return the entry points of all packages on `path`; reading those of 300 takes 20 ms."""
    del path  # the key of the cache
    return entry_points()


def singular(kind: str) -> str:
    if kind.endswith("sses"):
        return kind.removesuffix("es").replace("_", " ")
    return kind.removesuffix("s").replace("_", " ")


def _import(point: EntryPoint) -> Any:
    path, _, name = point.value.rpartition(":")
    if path.endswith(".py") or not point.pattern.match(point.value):
        kind = singular(point.group.removeprefix("rlctl."))
        module = path.removesuffix(".py").strip("./").replace("/", ".") or "module"
        raise ConfigError(
            f"{kind} {point.value!r} is not of the form module:Name",
            hint=f"write {module}:{name}; the current folder is searched",
        )
    package = point.module.partition(".")[0]
    if package != "rlctl":
        from rlctl.code_places import plugin_packages

        plugin_packages.add(package)
    try:
        module = importlib.import_module(point.module)
    except RlctlError:
        raise
    except (Exception, SystemExit) as error:
        from rlctl.plugins.faults import import_error

        raise import_error(point, error) from error
    found: Any = module
    for part in point.attr.split("."):
        if not hasattr(found, part):
            public = [each for each in vars(module) if not each.startswith("_")]
            hint = suggestion(point.attr, public)
            raise ConfigError(f"module {point.module!r} has no {point.attr!r}", hint=hint)
        found = getattr(found, part)
    if package != "rlctl":
        from rlctl.plugins.faults import check_attributes, check_kind

        check_kind(point, found)
        check_attributes(point, found)
    return found
