"""Faults of plug-ins: modules that do not import, objects of another kind."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.metadata import EntryPoint
from typing import Any

from rlctl.code_places import plugin_packages, users_place
from rlctl.errors import ConfigError, MissingExtraError
from rlctl.plugins import singular

# Methods of the kinds that are classes; a plug-in of any other of these kinds is called.
_METHODS = {
    "algorithms": ("from_config",),
    "engines": ("check", "from_spec"),
    "generators": ("check", "open"),
}
# Methods of objects, if the plug-in is their class: a function may return objects of another.
_OF_OBJECTS = {
    "loggers": ("start", "log", "finish"),
    "samplers": ("draw", "observe", "metrics", "state_dict", "load_state_dict"),
    "tool_parsers": ("parse",),
}
_CALLED = ("advantages", "policy_losses", "kl_estimators", "samplers", "datasets", "loggers")


def check_kind(point: EntryPoint, found: Any) -> None:
    """Raise ConfigError unless `found` has what rlctl uses of a plug-in of its kind."""
    kind = point.group.removeprefix("rlctl.")
    wanted = _METHODS.get(kind, ())
    if isinstance(found, type):
        wanted += _OF_OBJECTS.get(kind, ())
    lacking = [name for name in wanted if not hasattr(found, name)]
    if lacking or (kind in _CALLED and not callable(found)):
        raise ConfigError(
            f"the {singular(kind)} {point.value!r} is no {singular(kind)}: it "
            + (f"has no {', '.join(lacking)}" if lacking else "cannot be called"),
            hint="docs/extending.md has an example of each kind",
            code="E-PLUGIN",
        )


def check_attributes(point: EntryPoint, found: Any) -> None:
    """Raise ConfigError if `Params` or `unused_keys` of a plug-in are of another type."""
    params, unused = getattr(found, "Params", None), getattr(found, "unused_keys", ())
    wrong = None
    if params is not None and not hasattr(params, "model_validate_json"):
        wrong = f"its Params are {params!r:.60}, not a class of rlctl.plugins.Params"
    elif not callable(unused) and not isinstance(unused, Collection):
        wrong = f"its unused_keys are {unused!r:.60}, neither keys nor a function"
    if wrong is not None:
        kind = singular(point.group.removeprefix("rlctl."))
        raise ConfigError(f"the {kind} {point.value!r} is wrong: {wrong}", code="E-PLUGIN")


def import_error(point: EntryPoint, error: BaseException) -> BaseException:
    """Return the error to raise for a plug-in whose import raised `error`."""
    kind = singular(point.group.removeprefix("rlctl."))
    missing = error.name or str(error) if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{point.module}.".startswith(f"{missing}."):
        return ConfigError(
            f"{kind} {point.value!r}: no module named {missing!r}",
            hint="the current folder and the installed packages are searched",
        )
    if missing and sys.modules.get(missing.partition(".")[0]) is None:
        wanted = (
            f"'{point.dist.name}[{','.join(point.extras)}]'"
            if point.dist and point.extras
            else missing.partition(".")[0]
        )
        return MissingExtraError(
            f"{point.name!r} needs the package {missing!r}", hint=f"pip install {wanted}"
        )
    place = users_place(error, plugin_packages)
    if place is None and point.module.startswith("rlctl."):
        return error
    return ConfigError(
        f"the {kind} {point.value!r} does not import: {type(error).__name__}: {error}",
        where=place or point.module,
        hint="`rlctl --debug …` prints the traceback",
        code="E-REWARD-CODE" if kind == "reward" else "E-PLUGIN",
    )
