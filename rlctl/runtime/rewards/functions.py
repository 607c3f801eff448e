"""Reward functions: loading them, and calling them so that a failure cannot stop a run.

The signature is verl's; all arguments are passed by name:

    def compute_score(
        data_source: str, solution_str: str, ground_truth, extra_info: dict | None = None, **kwargs
    ) -> float | dict: ...

A dict has the key `score`. Its key `pred`, if any, is the final answer that the function extracted
from the response: `maj@N` votes with it. Its other numbers are components of the score, for metrics
and for estimators that use them separately. This module and its imports stay light, without torch,
because the worker processes of the pool load them.
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
    """A reward function, its weight in the sum of scores, and its settings.

    `function` is an entry point's name, `module:function` or `path.py:function`.
    """

    function: str
    weight: float
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the function, without module or path."""
        return self.function.rpartition(":")[2]


class Call(NamedTuple):
    """Arguments of one call of a reward function."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


class CallResult(NamedTuple):
    """Result of one call. The score is 0 if there is an `error`.

    `pred` is the final answer extracted from the response; None if the function returned none.
    """

    score: float
    components: dict[str, float]
    error: str | None = None
    timed_out: bool = False
    pred: str | None = None


class RewardTimeout(BaseException):
    """Raised inside a call that exceeds the time limit.

    It is no Exception, so that `except Exception` in a reward function does not catch it.
    """


def in_process(function: F) -> F:
    """Declare that `function` is fast and has no side effects, and needs no worker process."""
    setattr(function, _IN_PROCESS, True)
    return function


def runs_in_process(function: RewardFunction) -> bool:
    """Return True if `function` is declared with `in_process`."""
    return getattr(function, _IN_PROCESS, False)


def find_reward(given: str) -> RewardFunction:
    """Return the function of an entry point's name, `module:function` or `path.py:function`.

    Raises ConfigError, with file:line of the cause if a file does not import.
    """
    path, _, name = given.rpartition(":")
    if given.endswith(".py"):
        raise ConfigError(
            f"reward function {given!r} is a file without the name of a function",
            hint=f"{given}:compute_score",
        )
    function = (
        _from_file(Path(path).expanduser(), name)
        if path.endswith(".py")
        else plugins.load("rewards", given)
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


def load_reward(spec: RewardSpec) -> RewardFunction:
    """Return the function of `spec`. Raises ConfigError if it cannot be called with `kwargs`."""
    function = find_reward(spec.function)
    try:
        inspect.signature(function).bind(
            data_source="", solution_str="", ground_truth="", extra_info={}, **spec.kwargs
        )
    except TypeError as error:
        expected = ", ".join(
            ["data_source", "solution_str", "ground_truth", "extra_info", *spec.kwargs]
        )
        raise ConfigError(
            f"reward function {spec.function!r} cannot be called: {error}",
            where=_line_of(function),
            hint=f"accept the keyword arguments {expected}",
        ) from error
    return function


def call_reward(function: RewardFunction, call: Call, kwargs: Mapping[str, Any]) -> CallResult:
    """Call `function` once. An exception or a wrong return value gives 0 and an error."""
    try:
        return _to_result(function(**call._asdict(), **kwargs))
    except RewardTimeout as error:
        return CallResult(0.0, {}, str(error), timed_out=True)
    except (Exception, SystemExit) as error:
        return CallResult(0.0, {}, f"{type(error).__name__}: {error}{_cause(error)}")


def _to_result(result: Any) -> CallResult:
    """Convert a return value. Raises TypeError or ValueError if it has no finite score."""
    parts = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in parts:
        raise TypeError(f"the reward function returned a dict without 'score': {sorted(parts)}")
    value = parts["score"]
    if value is None or isinstance(value, str | bytes | list | tuple):
        raise TypeError(
            f"the reward function returned {value!r:.60}, not a number or a dict with 'score'"
        )
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"the reward function returned {score}")
    others = {
        str(name): float(part)
        for name, part in parts.items()
        if name not in ("score", "pred") and isinstance(part, Real)
    }
    pred = parts.get("pred")
    return CallResult(
        score,
        {name: part for name, part in others.items() if math.isfinite(part)},
        pred=None if pred is None else str(pred),
    )


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
            where=_line_of_error(error, path),
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


def _line_of_error(error: BaseException, path: Path) -> str:
    """Return file:line of a syntax error, or of the innermost frame in the user's file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


def _cause(error: BaseException) -> str:
    """Return " (file:line)" of the innermost frame outside this file."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename != __file__]
    return f" ({inside[-1].filename}:{inside[-1].lineno})" if inside else ""


def _line_of(function: RewardFunction) -> str | None:
    """Return file:line of a function's definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else None
