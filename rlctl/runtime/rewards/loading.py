"""Loading of reward functions: entry points, modules and files."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from rlctl import plugins
from rlctl.errors import ConfigError
from rlctl.runtime.rewards.functions import RewardFunction, RewardSpec
from rlctl.runtime.sandbox.user_code import load_named


class LoadedReward(NamedTuple):
    """A reward function and its keyword arguments."""

    function: RewardFunction
    kwargs: dict[str, Any]


def find_reward(given: str) -> RewardFunction:
    """Return the function of an entry point's name, `module:function` or `path.py:function`.

    Raises ConfigError, with file:line of the cause if a file or module does not import.
    """
    if given.endswith(".py"):
        raise ConfigError(
            f"reward function {given!r} is a file without the name of a function",
            hint=f"{given}:compute_score",
        )
    function = load_named("rewards", given, "reward")
    if not callable(function):
        raise ConfigError(
            f"reward function {given!r} is of type {type(function).__name__}, not a function",
            where=given.rpartition(":")[0] or None,
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


def _line_of(function: RewardFunction) -> str | None:
    """Return file:line of a function's definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else None
