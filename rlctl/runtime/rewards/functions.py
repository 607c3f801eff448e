"""What a reward function is, how one is found, and how one is called without being able to stop a run.

The signature is verl's; every argument is given by name:

    def compute_score(data_source: str, solution_str: str, ground_truth, extra_info: dict | None = None, **kwargs) -> float | dict

A dict holds `score`; its other numbers are kept as components of the score, for metrics and for estimators that want them apart.
This module and what it imports stay light: the worker processes of the pool load it, and no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlctl import plugins
from rlctl.errors import ConfigError

RewardFunction = Callable[..., Any]
F = TypeVar("F", bound=RewardFunction)

_IN_PROCESS = "__rlctl_in_process__"


@dataclass(frozen=True)
class RewardSpec:
    """One reward function of a run: an entry point's name, `module:function` or `path.py:function`; its weight; its extra arguments."""

    function: str
    weight: float
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]


class Call(NamedTuple):
    """One question to one reward function."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


class Answer(NamedTuple):
    """What came back; `error` tells why the score is 0 when the function raised, hung or returned no number."""

    score: float
    components: dict[str, float]
    error: str | None = None
    timed_out: bool = False


class RewardTimeout(BaseException):
    """Raised inside a call that took too long. Not an Exception: a function's own `except Exception` must not swallow it."""


def in_process(function: F) -> F:
    """Declares that `function` always returns within microseconds and has no side effects, so that it needs no process of its own."""
    setattr(function, _IN_PROCESS, True)
    return function


def runs_in_process(function: RewardFunction) -> bool:
    return getattr(function, _IN_PROCESS, False)


def find_reward(given: str) -> RewardFunction:
    """Return the function of an entry point's name, `module:function` or `path.py:function`.

    Raises ConfigError, with file:line of the cause if a file does not import.
    """
    path, _, name = given.rpartition(":")
    if given.endswith(".py"):
        raise ConfigError(
            f"reward function {given!r} names a file and no function",
            hint=f"{given}:compute_score",
        )
    function = (
        _from_file(Path(path).expanduser(), name)
        if path.endswith(".py")
        else plugins.load("rewards", given)
    )
    if not callable(function):
        raise ConfigError(
            f"reward function {given!r} is {type(function).__name__}, wanted a function",
            where=path or None,
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"reward function {given!r} is async, wanted a plain function",
            where=_line_of(function),
        )
    return function


def load_reward(spec: RewardSpec) -> RewardFunction:
    """Return the function that `spec` names. Raises ConfigError if it cannot be called with `kwargs`."""
    function = find_reward(spec.function)
    try:
        inspect.signature(function).bind(
            data_source="", solution_str="", ground_truth="", extra_info={}, **spec.kwargs
        )
    except TypeError as error:
        wanted = ", ".join(
            ["data_source", "solution_str", "ground_truth", "extra_info", *spec.kwargs]
        )
        raise ConfigError(
            f"reward function {spec.function!r} cannot be called: {error}",
            where=_line_of(function),
            hint=f"it is called with {wanted}, by name",
        ) from error
    return function


def answer(function: RewardFunction, call: Call, kwargs: Mapping[str, Any]) -> Answer:
    """Call `function` once. Whatever it does wrong is an answer of 0 that says so."""
    try:
        return _judged(function(**call._asdict(), **kwargs))
    except RewardTimeout as error:
        return Answer(0.0, {}, str(error), timed_out=True)
    except (Exception, SystemExit) as error:
        return Answer(0.0, {}, f"{type(error).__name__}: {error}{_cause(error)}")


def _judged(result: Any) -> Answer:
    parts = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in parts:
        raise TypeError(f"the reward function returned a dict without 'score': {sorted(parts)}")
    value = parts["score"]
    if value is None or isinstance(value, str | bytes | list | tuple):
        raise TypeError(
            f"the reward function returned {value!r:.60}, wanted a number or a dict with 'score'"
        )
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"the reward function returned {score}")
    others = {
        str(name): float(part)
        for name, part in parts.items()
        if name != "score" and isinstance(part, Real)
    }
    return Answer(score, {name: part for name, part in others.items() if math.isfinite(part)})


def _from_file(path: Path, name: str) -> Any:
    if not path.is_file():
        raise ConfigError(
            f"the reward file does not exist: {path}",
            hint="paths are relative to where rlctl is started",
        )
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(
            str(path.parent)
        )  # its neighbours can be imported; at the end, so that they hide nothing
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
            where=_place(error, path),
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


def _place(error: BaseException, path: Path) -> str:
    """file:line of what went wrong: the line that does not parse, or the deepest line of the user's own file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


def _cause(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename != __file__]
    return f" ({inside[-1].filename}:{inside[-1].lineno})" if inside else ""


def _line_of(function: RewardFunction) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else None
