"""The one place that finds exchangeable parts: algorithms, engines, rewards, loggers, data sources.

A part is named by its entry point in the group `rlctl.<kind>` (of rlctl itself or of any installed package), or as `module:Name`.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rlctl.errors import ConfigError, MissingExtraError, RlctlError


def names(kind: str) -> list[str]:
    """The entry points of `kind`, sorted. Imports none of them."""
    return sorted({point.name for point in entry_points(group=f"rlctl.{kind}")})


def packages(kind: str) -> dict[str, str]:
    """The entry points of `kind`, sorted, and the package that offers each. Imports none of them."""
    points = {
        point.name: point.dist.name if point.dist else ""
        for point in entry_points(group=f"rlctl.{kind}")
    }
    return dict(sorted(points.items()))


def load(kind: str, name: str, *, unknown: type[RlctlError] = ConfigError) -> Any:
    """The object behind an entry point's name, or behind `module:Name`.

    `kind` is the plural of the group (`rewards`, `loggers`); `unknown` is the error raised for a name that nothing answers to:
    UsageError where a user typed it as a verb. Raises MissingExtraError where the part needs a package that is not installed.
    """
    if ":" in name:
        return _import(EntryPoint(name, name, f"rlctl.{kind}"), unknown)
    points = {point.name: point for point in entry_points(group=f"rlctl.{kind}")}
    if name not in points:
        raise unknown(
            f"unknown {_singular(kind)} {name!r}",
            hint=suggestion(name, list(points)) + ", or module:Name",
        )
    return _import(points[name], unknown)


def suggestion(given: str, known: list[str]) -> str:
    """`did you mean "x"?` where something is near, and all that is known."""
    near = difflib.get_close_matches(given, known, n=1)
    listing = "known: " + (", ".join(sorted(known)) or "none")
    return f"did you mean {near[0]!r}? {listing}" if near else listing


def _singular(kind: str) -> str:
    return kind.removesuffix("s")


def _import(point: EntryPoint, unknown: type[RlctlError]) -> Any:
    try:
        module = importlib.import_module(point.module)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if point.module == missing or point.module.startswith(missing + "."):
            raise unknown(
                f"{_singular(point.group.removeprefix('rlctl.'))} {point.value!r}: no module named {missing!r}"
            ) from error
        wanted = (
            f"'{point.dist.name}[{','.join(point.extras)}]'"
            if point.dist and point.extras
            else missing.partition(".")[0]
        )
        raise MissingExtraError(
            f"{point.name!r} needs the package {missing!r}", hint=f"pip install {wanted}"
        ) from error
    found: Any = module
    for part in point.attr.split("."):
        if not hasattr(found, part):
            public = [each for each in vars(module) if not each.startswith("_")]
            raise unknown(
                f"module {point.module!r} has no {point.attr!r}",
                hint=suggestion(point.attr, public),
            )
        found = getattr(found, part)
    return found
