"""Loading of environments in a worker process: a plug-in, `module:Class` or `path.py:Class`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from rlctl import plugins
from rlctl.errors import ConfigError, RlctlError
from rlctl.runtime.agents.environments.calls import call
from rlctl.runtime.agents.environments.protocol import Environment
from rlctl.runtime.sandbox.user_code import load_named, user_line

KIND = "environments"
PARAMS_KEY = "actor_rollout_ref.rollout.agent.params"

Factory = Callable[[], Environment]


async def load_environment(
    name: str, values: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> Factory:
    """Return a function that builds the environment of an episode.

    `values` are the settings of the environment; `defaults` are those of any environment. A plug-in
    may have a function `prepare(params)`, which is called once per worker process; each environment
    gets its result as the argument `shared`. Raises ConfigError for an unknown environment or wrong
    settings, and for what `prepare` raises.
    """
    plugin = load_named(KIND, name, "environment")
    build: Callable[..., Environment] = plugin
    if not callable(plugin):
        raise ConfigError(
            f"the environment {name!r} is of type {type(plugin).__name__}, not a class",
            hint="a class with reset, tools, step, score and close",
        )
    arguments: dict[str, Any] = {}
    fields = getattr(plugins.params_model(plugin), "model_fields", {})
    values = {**{key: value for key, value in defaults.items() if key in fields}, **values}
    params = plugins.parse_params(plugin, name, values, PARAMS_KEY)
    if params is not None:
        arguments["params"] = params
    prepare = getattr(plugin, "prepare", None)
    if prepare is not None:
        try:
            arguments["shared"] = await call(prepare, params)
        except RlctlError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the environment {name!r} cannot be prepared: {type(error).__name__}: {error}",
                where=user_line(error, name),
            ) from error
    return partial(build, **arguments)
