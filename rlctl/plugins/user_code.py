"""Import of users' files, and lines in them: of functions, and where errors come from."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rlctl import plugins
from rlctl.errors import ConfigError, RlctlError

_PACKAGE = str(Path(__file__).parents[1])  # the folder of rlctl


def check_interpreter(python: str, where: str) -> None:
    """Raise ConfigError unless `python`, which the key `where` names, is a program."""
    if shutil.which(python) is None:
        raise ConfigError(
            f"{python!r} is not a program",
            where=where,
            hint="give the path of the interpreter, such as ENVIRONMENT/bin/python",
        )


def check_file(path: Path, failure: str, where: str | None = None) -> None:
    """Raise ConfigError, "`failure`: `path`", unless the file exists; `where` names its key."""
    if not path.is_file():
        raise ConfigError(
            f"{failure}: {path}",
            where=where,
            hint="paths are relative to the current folder",
        )


def load_named(kind: str, given: str, noun: str) -> Any:
    """Return what an entry point of `kind`, `module:name` or `path.py:name` names.

    `noun` names it in errors, such as "reward". Raises ConfigError, with file:line of the cause if
    a file or module does not import, and the errors of `plugins.load`.
    """
    path, _, name = given.rpartition(":")
    if "/" in path and not path.endswith(".py"):
        kind = "no Python file"
        if Path(path).expanduser().is_dir():
            kind = "a folder"
        raise ConfigError(
            f"the {noun} path {path!r} is {kind}",
            hint=f"name the file: {path.rstrip('/')}/FILE.py",
            code=_code(noun),
        )
    if path.endswith(".py"):
        return member(import_file(Path(path).expanduser(), noun), name, noun)
    with report_errors(f"the {noun} {given!r} does not import", given):
        return plugins.load(kind, given)


def _code(noun: str) -> str:
    return "E-REWARD-CODE" if noun == "reward" else "E-TOOLS"


def import_file(path: Path, noun: str) -> ModuleType:
    """Import a file. Raises ConfigError if that fails."""
    check_file(path, f"the {noun} file does not exist")
    path = path.resolve()
    name = f"rlctl_user_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if str(path.parent) not in sys.path:
        # Makes files in the same folder importable. At the end, so that they shadow nothing.
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"the {noun} file does not import: {type(error).__name__}: {error}",
            where=user_line(error, f"{path}:"),
            code=_code(noun),
        ) from error
    return module


def module_file(module: str) -> Path | None:
    """Return the source file of a module, or None if it has none. Imports nothing."""
    package, *parts = module.split(".")
    specs = (finder.find_spec(package, None, None) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    for part in parts:
        # By its last name: for a whole one, PathFinder wants parents without __init__.py imported.
        folders = spec and spec.submodule_search_locations
        spec = PathFinder.find_spec(part, [*(folders or ())])
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def member(module: ModuleType, name: str, noun: str) -> Any:
    """Return what `name` names in a file's module. Raises ConfigError if it is missing."""
    if not hasattr(module, name):
        defined = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise ConfigError(
            f"the {noun} file has no {name!r}",
            where=module.__file__,
            hint=plugins.suggestion(name, defined),
            code=_code(noun),
        )
    return getattr(module, name)


@contextmanager
def report_errors(
    what: str,
    given: str = "",
    *,
    where: str | None = None,
    hint: str | None = None,
    code: str | None = None,
) -> Iterator[None]:
    """Turn what users' code raises in the block into a ConfigError that begins with `what`.

    Its place is the line in the code of `given`, or else `where`. Errors of rlctl stay.
    """
    try:
        yield
    except RlctlError:
        raise
    except (Exception, SystemExit) as error:
        raise error_in_code(what, error, given, where=where, hint=hint, code=code) from error


def error_in_code(
    what: str,
    error: BaseException,
    given: str = "",
    *,
    where: str | None = None,
    hint: str | None = None,
    code: str | None = None,
) -> ConfigError:
    """Return the error for what users' code raised: see `report_errors`."""
    place = user_line(error, given) if given else None
    text = f"{what}: {type(error).__name__}: {error}"
    return ConfigError(text, where=place or where, hint=hint, code=code)


def line_of(function: Callable[..., Any]) -> str | None:
    """Return file:line of a function's definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    return f"{code.co_filename}:{code.co_firstlineno}"


def user_line(error: BaseException, given: str) -> str | None:
    """Return file:line of a syntax error, or of the innermost frame of the code of `given`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    path = given.rpartition(":")[0]
    file = str(Path(path).expanduser().resolve()) if path.endswith(".py") else None
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == file
        or (file is None and not frame.filename.startswith(("<", _PACKAGE)))
    ]
    if not frames:
        return file
    return f"{frames[-1].filename}:{frames[-1].lineno}"
