"""`rlctl env`: the installed environments and tools, and trials of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.options import Json

if TYPE_CHECKING:
    from rlctl.runtime.agents.environments.scripted import Parse, Transcript

app = typer.Typer(no_args_is_help=True)

_TEST_EXAMPLE = """
Example: rlctl env test gridworld size=4 --scripted moves.txt --episodes 2
"""

Name = Annotated[
    str, typer.Argument(metavar="ENV", help="Environment: name, module:Class or path.py:Class.")
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings of the environment, such as size=4 or 'tools=[calculator]'.",
    ),
]


@app.callback()
def env() -> None:
    """List, show and test environments and tools."""


@app.command("ls", epilog="Example: rlctl env ls --json")
def list_environments(as_json: Json = False) -> None:
    """List the installed environments and tools."""
    from rlctl.cli.console import print_json, stdout, table

    found = [
        {"name": name, "kind": kind, "description": text}
        for kind in ("environment", "tool")
        for name, text in _descriptions(f"{kind}s").items()
    ]
    if as_json:
        print_json(found)
        return
    columns = ["name", "kind", "description"]
    stdout().print(table(columns, [[each[name] for name in columns] for each in found]))


@app.command("show", epilog="Example: rlctl env show tools 'tools=[calculator]'")
def show(name: Name, settings: Settings = None, as_json: Json = False) -> None:
    """Show the settings of an environment or tool, and the tools that the policy may call."""
    from rlctl import plugins
    from rlctl.cli.console import print_json
    from rlctl.cli.views.env import print_environment
    from rlctl.runtime.agents.environments.loading import KIND, find_environment
    from rlctl.runtime.agents.environments.toolset import KIND as TOOLS
    from rlctl.runtime.sandbox.user_code import load_named

    is_tool = name in plugins.names(TOOLS) and name not in plugins.names(KIND)
    found = load_named(TOOLS, name, "tool") if is_tool else find_environment(name, {})[0]
    model = plugins.params_model(found)
    fields = model.model_fields.items() if model else ()
    shown = {
        "name": name,
        "description": _first_line(found),
        "settings": [
            {
                "name": key,
                "default": "required" if field.is_required() else field.get_default(),
                "description": field.description or "",
            }
            for key, field in fields
        ],
        "tools": _schemas(name, _values(settings), is_tool),
    }
    if as_json:
        print_json(shown)
    else:
        print_environment(shown)


@app.command("test", epilog=_TEST_EXAMPLE)
def try_environment(
    name: Name,
    settings: Settings = None,
    scripted: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Turns of the policy, one a line; a blank line starts the next episode's. A line "
            'may be JSON: {"text": "", "calls": [{"name": "f", "arguments": {}}]}.',
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rows of the episodes; by default rows with a seed."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 1,
    parser: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="Parser of tool calls.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Time limit of a call and of a turn in seconds.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Play episodes with scripted turns; print what is said, rewards and seconds.

    Exit with code 1 if an environment fails.
    """
    import asyncio
    from dataclasses import asdict

    from rlctl.cli.console import print_json
    from rlctl.cli.views.env import print_transcripts
    from rlctl.runtime.agents.environments.pool import EnvironmentPool, Timeouts
    from rlctl.runtime.agents.environments.scripted import play, read_script

    scripts = read_script(scripted.expanduser()) if scripted else [[]]
    rows, parse = _rows(data, episodes), _parser(parser)
    limits = Timeouts(timeout, timeout)

    async def run() -> list[Transcript]:
        return await asyncio.gather(
            *(
                play(pool, row, str(index), scripts[index % len(scripts)], parse)
                for index, row in enumerate(rows)
            )
        )

    with EnvironmentPool(name, _values(settings), timeouts=limits) as pool:
        transcripts = asyncio.run(run())
    if as_json:
        print_json([asdict(each) for each in transcripts])
    else:
        print_transcripts(transcripts)
    if any(each.error for each in transcripts):
        raise typer.Exit(1)


def _descriptions(kind: str) -> dict[str, str]:
    """Return the names of plug-ins, and the first line of the docstring of each."""
    from rlctl import plugins
    from rlctl.errors import MissingExtraError

    found: dict[str, str] = {}
    for name in plugins.names(kind):
        try:
            found[name] = _first_line(plugins.load(kind, name))
        except MissingExtraError as error:
            found[name] = f"not installed: {error.problems[0].hint}"
    return found


def _schemas(name: str, values: dict[str, Any], is_tool: bool) -> list[dict[str, Any]]:
    """Return the tools that the policy may call; none if settings that they depend on are missing.

    Raises ConfigError for wrong settings.
    """
    import asyncio

    from rlctl.errors import ConfigError
    from rlctl.runtime.agents.environments.pool import EnvironmentPool
    from rlctl.runtime.agents.environments.toolset import load_toolset

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


def _values(settings: Sequence[str] | None) -> dict[str, Any]:
    """Return settings by name; values are YAML. Raises UsageError for one without `=`."""
    import yaml

    from rlctl.errors import UsageError

    values: dict[str, Any] = {}
    for setting in settings or ():
        key, mark, value = setting.partition("=")
        if not mark:
            raise UsageError(f"the setting {setting!r} has no value", hint=f"{setting}=VALUE")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"the value of {key} is no YAML: {value}") from error
    return values


def _rows(data: Path | None, number: int) -> list[dict[str, Any]]:
    """Return the rows of the episodes: the first of a file, or rows with a seed only."""
    if data is None:
        return [{"prompt": [], "extra_info": {"index": i, "seed": i}} for i in range(number)]
    from dataclasses import asdict

    from rlctl.data_prep.rows import read_rows

    rows = [asdict(row) for row in read_rows(data)]
    return [rows[index % len(rows)] for index in range(number)]


def _parser(name: str | None) -> Parse:
    """Return the parser of tool calls: `name`, or that of the recipes."""
    from rlctl import plugins
    from rlctl.recipes.compose import compose

    rollout = compose("ppo").config.actor_rollout_ref.rollout
    return plugins.load("tool_parsers", name or rollout.multi_turn.format)().parse
