"""`rlctl env`: the installed environments and tools, and trials of them."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from rlctl import plugins
from rlctl.cli.console import print_json, print_table
from rlctl.cli.options import Json
from rlctl.errors import ConfigError, MissingExtraError
from rlctl.plugins.agents.commands import env_test
from rlctl.plugins.agents.commands.env_test import Name, Settings, parse_settings

app = typer.Typer(help="List, show and test environments and tools.", no_args_is_help=True)
app.add_typer(env_test.app)


Python = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Interpreter whose environments of verifiers are listed."),
]


@app.command("ls", epilog="Example: rlctl env ls --json")
def list_environments(python: Python = None, as_json: Json = False) -> None:
    """List the installed environments and tools, those of verifiers included."""
    from rlctl.data_prep.verifiers_rows import installed

    found = [
        {"name": name, "kind": kind, "description": text}
        for kind in ("environment", "tool")
        for name, text in _descriptions(f"{kind}s").items()
    ]
    found += [
        {"name": name, "kind": "verifiers", "description": text}
        for name, text in installed(python).items()
    ]
    if as_json:
        print_json(found)
        return
    columns = ["name", "kind", "description"]
    print_table(columns, [[row[name] for name in columns] for row in found])


@app.command("show", epilog="Example: rlctl env show tools 'tools=\\[calculator]'")
def show(name: Name, settings: Settings = None, as_json: Json = False) -> None:
    """Show the settings of an environment or tool, and the tools that the policy may call."""
    from rlctl.cli.views.samples import print_environment
    from rlctl.plugins.agents.environments.environment_loading import find_environment
    from rlctl.plugins.agents.environments.toolset import KIND as TOOLS
    from rlctl.plugins.user_code import load_named

    is_tool = _is_tool(name)
    if is_tool:
        found = load_named(TOOLS, name, "tool")
    else:
        found, _ = find_environment(name, {})
    fields = getattr(plugins.params_model(found), "model_fields", {})
    shown = {
        "name": name,
        "description": _first_line(found),
        "settings": [
            {
                "name": key,
                "default": "required" if field.is_required() else field.get_default(),
                "description": field.description or "",
            }
            for key, field in fields.items()
        ],
        "tools": _schemas(name, parse_settings(settings), is_tool),
    }
    if as_json:
        print_json(shown)
    else:
        print_environment(shown)


def _descriptions(kind: str) -> dict[str, str]:
    """Return the names of plug-ins, and the first line of the docstring of each."""

    found: dict[str, str] = {}
    for name in plugins.names(kind):
        try:
            found[name] = _first_line(plugins.load(kind, name))
        except MissingExtraError as error:
            found[name] = f"not installed: {error.problems[0].help}"
    return found


def _is_tool(name: str) -> bool:
    """Return True if `name` names a tool and no environment."""

    from rlctl.plugins.agents.environments.environment_loading import KIND
    from rlctl.plugins.agents.environments.function_tools import is_marked
    from rlctl.plugins.agents.environments.skyrl import provide_skyrl
    from rlctl.plugins.agents.environments.toolset import KIND as TOOLS
    from rlctl.plugins.user_code import load_named

    if ":" not in name:
        return name in plugins.names(TOOLS) and name not in plugins.names(KIND)
    provide_skyrl()  # the file of an environment may import it
    found = load_named(KIND, name, "environment or tool")
    has_sessions = inspect.isclass(found) and hasattr(found, "session")
    return is_marked(found) or (has_sessions and not hasattr(found, "reset"))


def _schemas(name: str, values: dict[str, Any], is_tool: bool) -> list[dict[str, Any]]:
    """Return the tools that the policy may call; none if settings that they depend on are missing.

    Raises ConfigError for wrong settings.
    """
    import asyncio

    from rlctl.plugins.agents.environments.environment_pool import EnvironmentPool
    from rlctl.plugins.agents.environments.toolset import load_toolset

    try:
        if is_tool:
            tools = asyncio.run(load_toolset([name], {name: values})).tools
            return [tool.schema for tool in tools.values()]
        with EnvironmentPool(name, values) as pool:
            return pool.tools
    except ConfigError:
        if values:
            raise
        return []


def _first_line(value: Any) -> str:
    return (value.__doc__ or "").strip().partition("\n")[0]
