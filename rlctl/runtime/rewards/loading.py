"""Loading of reward functions: entry points, modules and files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rlctl import plugins
from rlctl.errors import ConfigError, RlctlError
from rlctl.runtime.rewards.functions import (
    Call,
    LoadedReward,
    RewardFunction,
    RewardSpec,
    Traits,
    is_user_code,
)

T = TypeVar("T")


def find_reward(given: str) -> RewardFunction:
    """Return the function of an entry point's name, `module:function` or `path.py:function`.

    Raises ConfigError, with file:line of the cause if a file or module does not import.
    """
    if given.endswith(".py"):
        raise ConfigError(
            f"reward function {given!r} is a file without the name of a function",
            hint=f"{given}:compute_score",
        )
    if is_user_code(given):
        from rlctl.plugins.user_code import load_named

        function = load_named("rewards", given, "reward")
    else:
        function = plugins.load("rewards", given)
    if not callable(function):
        raise ConfigError(
            f"reward function {given!r} is of type {type(function).__name__}, not a function",
            where=given.rpartition(":")[0] or None,
        )
    return function


def load_reward(spec: RewardSpec) -> LoadedReward:
    """Return the function of `spec` with its settings, and call its `prepare`, if it has one.

    Raises ConfigError for wrong settings, or if the function cannot be called with them.
    """
    function = find_reward(spec.function)
    params = _params(spec, function)
    kwargs = dict(spec.kwargs) if params is None else params.model_dump()
    reward = LoadedReward(function, kwargs, Traits.of(function))
    arguments = reward.arguments([Call("", "", "", {})])
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        from rlctl.plugins.user_code import line_of

        raise ConfigError(
            f"reward function {spec.function!r} cannot be called: {error}",
            where=line_of(function),
            hint=f"accept the keyword arguments {', '.join(arguments)}",
        ) from error
    prepare = getattr(function, "prepare", None)
    if prepare is not None:
        _build(spec, prepare)
    return reward


def ask_plugin(spec: RewardSpec, attribute: str) -> Any:
    """Return the result of a plug-in's function of its settings; None if it has none.

    The attribute `environment` returns names of environment variables, `uses_engine` is true if the
    plug-in sends requests to the run's engine.
    """
    if is_user_code(spec.function):
        return None
    function = find_reward(spec.function)
    answer = getattr(function, attribute, None)
    return answer and answer(_params(spec, function))


def _params(spec: RewardSpec, function: RewardFunction) -> plugins.Params | None:
    """Return the validated settings of a function that declares them, else None."""
    if plugins.params_model(function) is None:
        return None
    arguments = (function, spec.name, spec.kwargs, f"reward.params.{spec.name}")
    return _build(spec, plugins.parse_params, *arguments)


def _build(spec: RewardSpec, call: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a call, and turn errors of users' code into a ConfigError."""
    try:
        return call(*arguments)
    except RlctlError:
        raise
    except (Exception, SystemExit) as error:
        from rlctl.plugins.user_code import error_in_code

        failure = f"the reward {spec.function!r} cannot be built"
        raise error_in_code(failure, error, spec.function, code="E-REWARD-CODE") from error
