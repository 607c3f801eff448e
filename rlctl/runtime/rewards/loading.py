"""Loading of reward functions: entry points, modules and files."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from rlctl import plugins
from rlctl.errors import ConfigError, RlctlError
from rlctl.runtime.rewards.functions import RewardFunction, RewardSpec

_PACKAGE = str(Path(__file__).parents[2])  # the folder of rlctl


class LoadedReward(NamedTuple):
    """A reward function and its keyword arguments."""

    function: RewardFunction
    kwargs: dict[str, Any]


def find_reward(given: str) -> RewardFunction:
    """Return the function of an entry point's name, `module:function` or `path.py:function`.

    Raises ConfigError, with file:line of the cause if a file or module does not import.
    """
    path, _, name = given.rpartition(":")
    if given.endswith(".py"):
        raise ConfigError(
            f"reward function {given!r} is a file without the name of a function",
            hint=f"{given}:compute_score",
        )
    function = (
        _from_file(Path(path).expanduser(), name) if path.endswith(".py") else _from_module(given)
    )
    if not callable(function):
        raise ConfigError(
            f"reward function {given!r} is of type {type(function).__name__}, not a function",
            where=path or None,
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"reward function {given!r} is async",
            hint="define it with `def`",
            where=_line_of(function),
        )
    return function


def load_reward(spec: RewardSpec) -> LoadedReward:
    """Return the function of `spec` with its settings, and call its `prepare`, if it has one.

    Raises ConfigError for wrong settings, or if the function cannot be called with them.
    """
    function = find_reward(spec.function)
    kwargs = dict(spec.kwargs)
    if plugins.params_model(function) is not None:
        key = f"reward.params.{spec.name}"
        params = plugins.parse_params(function, spec.name, kwargs, key)
        kwargs = params.model_dump() if params else {}
    try:
        inspect.signature(function).bind(
            data_source="", solution_str="", ground_truth="", extra_info={}, **kwargs
        )
    except TypeError as error:
        expected = ", ".join(["data_source", "solution_str", "ground_truth", "extra_info", *kwargs])
        raise ConfigError(
            f"reward function {spec.function!r} cannot be called: {error}",
            where=_line_of(function),
            hint=f"accept the keyword arguments {expected}",
        ) from error
    prepare = getattr(function, "prepare", None)
    if prepare is not None:
        prepare()
    return LoadedReward(function, kwargs)


def user_line(error: BaseException, function: str) -> str | None:
    """Return file:line of a syntax error, or of the innermost frame of the code of `function`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    path = function.rpartition(":")[0]
    file = str(Path(path).expanduser().resolve()) if path.endswith(".py") else None
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == file
        or (file is None and not frame.filename.startswith(("<", _PACKAGE)))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else file


def _from_module(given: str) -> Any:
    """Return what an entry point's name or `module:function` names.

    Raises ConfigError if the module raises, and the errors of `plugins.load`.
    """
    try:
        return plugins.load("rewards", given)
    except RlctlError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the reward function {given!r} does not import: {type(error).__name__}: {error}",
            where=user_line(error, given),
        ) from error


def _from_file(path: Path, name: str) -> Any:
    """Import the file and return its function `name`. Raises ConfigError if that fails."""
    if not path.is_file():
        raise ConfigError(
            f"the reward file does not exist: {path}",
            hint="paths are relative to the current folder",
        )
    path = path.resolve()
    if str(path.parent) not in sys.path:
        # Makes files in the same folder importable. At the end, so that they shadow nothing.
        sys.path.append(str(path.parent))
    module_name = f"rlctl_reward_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    loader_spec = importlib.util.spec_from_file_location(module_name, path)
    assert loader_spec is not None  # a .py file always has a loader
    assert loader_spec.loader is not None
    module = importlib.util.module_from_spec(loader_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        loader_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(
            f"the reward file does not import: {type(error).__name__}: {error}",
            where=user_line(error, f"{path}:{name}"),
        ) from error
    if not hasattr(module, name):
        own = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module_name
        ]
        raise ConfigError(
            f"the reward file has no function {name!r}",
            where=str(path),
            hint=plugins.suggestion(name, own),
        )
    return getattr(module, name)


def _line_of(function: RewardFunction) -> str | None:
    """Return file:line of a function's definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else None
