"""The tools of a run: by name, from a file of functions, verl's configuration, and MCP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl import plugins
from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments.function_tools import FunctionTool, tools_of_file
from rlctl.plugins.agents.environments.mcp_tools import tools_of_servers
from rlctl.plugins.agents.environments.tool import Tool, argument_checker, name_of
from rlctl.plugins.agents.environments.verl.tools import tools_of_config
from rlctl.plugins.user_code import load_named

KIND = "tools"


@dataclass(frozen=True)
class ToolSet:
    """Tools by name, and for each a function that checks the arguments of a call."""

    tools: Mapping[str, Tool]
    checkers: Mapping[str, Callable[[Mapping[str, Any]], str | None]]


async def load_toolset(
    names: Sequence[str],
    params: Mapping[str, Mapping[str, Any]],
    *,
    function_tool_path: str | None = None,
    tool_config_path: str | None = None,
    mcp_config_path: str | None = None,
) -> ToolSet:
    """Return all tools, in the order of the arguments.

    `names` are plug-ins, `module:name` or `path.py:name`; `params` their settings by name. Raises
    ConfigError for a tool that cannot be loaded or a name that two tools have.
    """
    if unused := [name for name in params if name not in names]:
        raise ConfigError(
            f"tool_params has settings of {unused[0]!r}, which `tools` does not name",
            hint=plugins.suggestion(unused[0], list(names)),
        )
    tools: list[Tool] = [_named(name, params.get(name, {})) for name in names]
    if function_tool_path:
        tools += tools_of_file(function_tool_path)
    if tool_config_path:
        tools += await tools_of_config(tool_config_path)
    if mcp_config_path:
        tools += await tools_of_servers(mcp_config_path)
    return tool_set(tools)


def tool_set(tools: Sequence[Tool]) -> ToolSet:
    """Return `tools` by name. Raises ConfigError for a name that two tools have."""
    by_name: dict[str, Tool] = {}
    for tool in tools:
        name = name_of(tool.schema)
        if name in by_name:
            raise ConfigError(f"two tools have the name {name!r}", hint="rename one of them")
        by_name[name] = tool
    return ToolSet(by_name, {name: argument_checker(tool) for name, tool in by_name.items()})


def _named(name: str, values: Mapping[str, Any]) -> Tool:
    """Return the tool that a plug-in, `module:name` or `path.py:name` names."""
    found = load_named(KIND, name, "tool")
    build: Callable[..., Tool] = found
    params = plugins.parse_params(found, name, values, f"tool_params.{name}")
    if not inspect.isclass(found):
        return FunctionTool(found)
    return build() if params is None else build(params=params)
