"""Loading of environments in a worker process: a plug-in, `module:Class` or `path.py:Class`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from rlctl import plugins
from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments.protocol import Environment
from rlctl.plugins.agents.environments.skyrl import SkyRLEnvironment, provide_skyrl
from rlctl.plugins.agents.environments.trl import TRLEnvironment
from rlctl.plugins.user_code import load_named, report_errors
from rlctl.runtime.sandbox.async_functions import is_async

KIND = "environments"
PARAMS_KEY = "actor_rollout_ref.rollout.agent.params"

Factory = Callable[[], Environment]


def load_environment(
    name: str, values: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[], Awaitable[Factory]]:
    """Import an environment; return a coroutine function that prepares the builder of episodes'.

    `values` are the settings of the environment; `defaults` apply to any environment. A plug-in
    may have a function `prepare(params)`, which is called once per worker process; each environment
    gets its result, if it is not None, as the argument `shared`. A synchronous one is called here,
    as modules that handle signals or run an event loop expect: in the main thread and without a
    running loop. Raises ConfigError for an unknown environment or wrong settings, and for what
    `prepare` raises.
    """
    plugin, values = find_environment(name, values)
    fields = getattr(plugins.params_model(plugin), "model_fields", {})
    values = {**{key: value for key, value in defaults.items() if key in fields}, **values}
    params = plugins.parse_params(plugin, name, values, PARAMS_KEY)
    arguments: dict[str, Any] = {} if params is None else {"params": params}
    prepare: Any = getattr(plugin, "prepare", lambda _: None)
    shared: Any = None
    failure = f"the environment {name!r} cannot be prepared"
    if not is_async(prepare):
        with report_errors(failure, name):
            shared = prepare(params)

    async def factory() -> Factory:
        with report_errors(failure, name):
            found = await prepare(params) if is_async(prepare) else shared
        if found is None:
            return partial(plugin, **arguments)
        return partial(plugin, **arguments, shared=found)

    return factory


def find_environment(name: str, values: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the class that `name` names, or its adapter, and its settings."""
    provide_skyrl()  # the file of the class may import it
    found = load_named(KIND, name, "environment")
    if isinstance(found, Mapping):
        return TRLEnvironment, {"factory": name, **values}
    if not callable(found):
        raise ConfigError(
            f"the environment {name!r} is of type {type(found).__name__}, not a class",
            hint="a class with reset, tools, step, score and close",
        )
    if ":" in name and inspect.isclass(found):
        return _adapted(found, name, values)
    return found, values


def _adapted(found: Any, name: str, values: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return a class with the methods of `Environment`, and its settings.

    A class of SkyRL-Gym or TRL, which is known by its methods, gets its adapter.
    """

    methods = set(dir(found))
    if {"reset", "step", "score", "close"} <= methods:
        return found, values
    if {"init", "step"} <= methods:
        return SkyRLEnvironment, {"env_class": name, **values}
    if "reset" in methods and "step" not in methods:
        return TRLEnvironment, {"factory": name, **values}
    raise ConfigError(
        f"the class {name} is no environment: it has neither reset, step, score and close, nor "
        "init and step (SkyRL-Gym), nor reset and tools as methods (TRL)",
    )
