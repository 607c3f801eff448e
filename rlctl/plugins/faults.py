"""Faults of plug-ins: modules that do not import, objects of another kind."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from rlctl.code_places import plugin_packages, users_place
from rlctl.errors import ConfigError, MissingExtraError, Problem
from rlctl.plugins import is_removed, names, singular, suggestion

if TYPE_CHECKING:
    from pydantic import ValidationError

    from rlctl.params import Params

# Methods of the kinds that are classes; a plug-in of any other of these kinds is called.
_METHODS = {
    "algorithms": ("from_config",),
    "dialects": ("reads", "translate", "translator"),
    "engines": ("check", "from_spec"),
    "generators": ("check", "open"),
    "roles": ("check", "build"),
}
# Methods of objects, if the plug-in is their class: a function may return objects of another.
_OF_OBJECTS = {
    "loggers": ("start", "log", "finish"),
    "samplers": ("draw", "observe", "metrics", "state_dict", "load_state_dict"),
    "tool_parsers": ("parse",),
}
_IN_FILES = ("rewards", "environments")  # kinds that files may define, too
_CALLED = (
    *("advantages", "policy_losses", "kl_estimators", "samplers", "readers", "datasets"),
    "loggers",
)


def unknown_name(kind: str, name: str) -> ConfigError:
    """Return the error for the name of a plug-in that is in no list."""
    if (problem := removed(kind, name)) is not None:
        return ConfigError(problem)
    return ConfigError(
        f"unknown {singular(kind)} {name!r}",
        hint=suggestion(name, names(kind)) + _forms(kind, name),
        code="E-PLUGIN",
    )


def removed(kind: str, name: str) -> Problem | None:
    """Return the problem of a bundled plug-in whose folder was deleted; None for other names."""
    for point in entry_points(group=f"rlctl.{kind}", name=name):
        if is_removed(point):
            return Problem(
                f"the {singular(kind.partition('.')[0])} {name!r} is not in this installation",
                hint=f"install rlctl again: {point.module.rpartition('.')[0]} was deleted",
                code="E-PLUGIN",
            )
    return None


def check_app(name: str | None, found: Any) -> None:
    """Raise ConfigError unless the command `name` is a `typer.Typer` that has commands."""
    from typer import Typer

    if not isinstance(found, Typer):
        raise ConfigError(
            f"the command {name!r} is of type {type(found).__name__}",
            hint="its entry point names a typer.Typer",
        )
    if not (found.registered_commands or found.registered_groups or found.registered_callback):
        raise ConfigError(f"the command {name!r} is a typer.Typer without commands")


def _forms(kind: str, given: str) -> str:
    """Return how a plug-in of `kind` is named without an entry point, as the end of a list."""
    if kind not in _IN_FILES:
        return ", or module:Name"
    file = given if given.endswith(".py") else "FILE.py"
    return f", {file}:NAME or module:NAME"


def check_kind(point: EntryPoint, found: Any) -> None:
    """Raise ConfigError unless `found` has what rlctl uses of a plug-in of its kind."""
    kind = point.group.removeprefix("rlctl.")
    wanted = _METHODS.get(kind, ())
    if isinstance(found, type):
        wanted += _OF_OBJECTS.get(kind, ())
    reason = None
    if lacking := [name for name in wanted if not hasattr(found, name)]:
        reason = f"has no {', '.join(lacking)}"
    elif kind in _CALLED and not callable(found):
        reason = "cannot be called"
    if reason is not None:
        raise ConfigError(
            f"the {singular(kind)} {point.value!r} is no {singular(kind)}: it {reason}",
            hint="docs/extending.md has an example of each kind",
            code="E-PLUGIN",
        )


def check_attributes(point: EntryPoint, found: Any) -> None:
    """Raise ConfigError if `Params` or `unused_keys` of a plug-in are of another type."""
    params = getattr(found, "Params", None)
    unused = getattr(found, "unused_keys", ())
    wrong = None
    if params is not None and not hasattr(params, "model_validate_json"):
        wrong = f"its Params are {params!r:.60}, not a class of rlctl.plugins.Params"
    elif not callable(unused) and not isinstance(unused, Collection):
        wrong = f"its unused_keys are {unused!r:.60}, neither keys nor a function"
    if wrong is not None:
        kind = singular(point.group.removeprefix("rlctl."))
        raise ConfigError(f"the {kind} {point.value!r} is wrong: {wrong}", code="E-PLUGIN")


def wrong_settings(model: type[Params], name: str, key: str, error: ValidationError) -> ConfigError:
    """Return the error with one problem per wrong setting of the plug-in `name`."""
    errors = {item["loc"][:1]: item for item in reversed(error.errors(include_url=False))}
    return ConfigError(*(_problem(model, name, key, item) for item in reversed(errors.values())))


def _problem(model: type[Params], name: str, key: str, error: Mapping[str, Any]) -> Problem:
    field = str(error["loc"][0]) if error["loc"] else ""
    where = f"{key}.{field}" if field else key
    if error["type"] == "extra_forbidden":
        hint = suggestion(field, list(model.model_fields))
        return Problem(f"{name} has no setting {field!r}", where, hint)
    known = model.model_fields.get(field)
    help_text = known and known.description
    if error["type"] == "missing":
        return Problem(f"{name} needs a value for {field}", where, help_text)
    what = error["msg"].removeprefix("Value error, ")
    if what.startswith("Input "):
        given = error["input"]
        written = "null" if given is None else repr(given)
        message = f"{field} of {name} {what[len('Input ') :]}, not {written}"
        return Problem(message, where, help_text, code="E-WRONG-VALUE")
    return Problem(f"{name}: {what}", where, help_text)


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
        wanted = missing.partition(".")[0]
        if point.dist and point.extras:
            wanted = f"'{point.dist.name}[{','.join(point.extras)}]'"
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
