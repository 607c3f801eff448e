"""Errors of libraries whose installed version is outside of the range that rlctl declares."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlctl.errors import MissingExtraError
from rlctl.packages import installed_version

_SITE = re.compile(r"(?:site|dist)-packages/(?P<module>[\w-]+)")


def outside_range(error: BaseException) -> MissingExtraError | None:
    """Return an error that names the library, its version and the wanted one, or None.

    It is for an ImportError or AttributeError that such a library raised, or that its absence or
    another name in it caused.
    """
    if not isinstance(error, ImportError | AttributeError):
        return None
    known = packages_distributions()
    for module in dict.fromkeys(_modules(error)):
        for package in (*known.get(module, ()), module):
            for requirement in _requirements(package):
                found = installed_version(requirement.name)
                if found is None or not requirement.specifier.contains(found, prereleases=True):
                    return _error(requirement, found, error)
    return None


def _error(requirement: Requirement, found: str | None, error: BaseException) -> MissingExtraError:
    wanted = f"{requirement.name}{requirement.specifier}"
    state = "is not installed"
    if found is not None:
        state = f"{found} is installed"
    reason = str(error).partition("\n")[0]
    return MissingExtraError(
        f"{requirement.name} {state}, and rlctl needs {wanted} ({type(error).__name__}: {reason})",
        hint=f"pip install '{wanted}'",
        code="E-VERSION",
    )


def _modules(error: ImportError | AttributeError) -> Iterator[str]:
    """Yield the top-level modules that the error names, and those that it went through."""
    if isinstance(error, ImportError):
        yield (error.name or "").partition(".")[0]
    else:
        yield _module_of(error.obj).partition(".")[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if found := _SITE.search(Path(frame.filename).as_posix()):
            yield found["module"]


def _module_of(value: object) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type):
        return value.__module__
    return type(value).__module__


def _requirements(package: str) -> Iterator[Requirement]:
    """Yield what rlctl and its extras require of a package, the base's first."""
    wanted = [Requirement(text) for text in requires("rlctl") or ()]
    wanted.sort(key=lambda requirement: "extra" in str(requirement.marker))
    for requirement in wanted:
        if canonicalize_name(requirement.name) == canonicalize_name(package):
            yield requirement
