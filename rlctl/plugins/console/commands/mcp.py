"""`rlctl mcp`: runs, metrics, samples and dry runs for clients of the Model Context Protocol."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rlctl.cli.console import print_json
from rlctl.cli.options import Json, Root
from rlctl.cli.stderr import notice

app = typer.Typer(add_completion=False)

_EXAMPLES = """
Examples:

  rlctl mcp --json                        the tools, for a look

  {"mcpServers": {"rlctl": {
    "command": "rlctl", "args": ["mcp", "--root", "/home/me/runs"]}}}

  rlctl mcp --allow-train                 also start and stop runs

The second one is the configuration of a client, which starts the server itself.
"""


@app.command("mcp", epilog=_EXAMPLES)
def mcp(
    allow_train: Annotated[
        bool,
        typer.Option(
            "--allow-train",
            help="Also offer tools that start and stop runs, and dry runs of any recipe and code.",
        ),
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Serve runs to clients of the Model Context Protocol.

    It uses stdin and stdout. Tools list, show and compare runs and sweeps, return metrics and
    samples, and check settings of shipped recipes. They only read. --json lists the tools instead.
    """
    from rlctl.plugins.console.mcp_server import server
    from rlctl.runs.naming import DEFAULT_ROOT

    made = server((root or DEFAULT_ROOT).absolute(), allow_train)
    if as_json:
        import anyio

        print_json([tool.model_dump(exclude_none=True) for tool in anyio.run(made.list_tools)])
        return
    if sys.stdin.isatty():
        notice("a client of the Model Context Protocol starts this command; Ctrl-D ends it")
    made.run("stdio")
