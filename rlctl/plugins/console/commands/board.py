"""`rlctl board`: runs live in the browser."""

from __future__ import annotations

from typing import Annotated

import typer

from rlctl.cli.options import Json, Root

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl board                               opens a browser on this machine

  rlctl board --no-open --port 0 --json    prints the address as JSON

  rlctl board --host 0.0.0.0 --read-only     for others, with a token

On a remote machine: ssh -L 8420:127.0.0.1:8420 HOST rlctl board --no-open
"""


@app.command(epilog=_EXAMPLES)
def board(
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")
    ] = 8420,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on. Other machines reach 0.0.0.0 or ::."),
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="RLCTL_BOARD_TOKEN",
            help="Require this token; by default one that is kept for this user.",
            show_default=False,
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Offer no buttons that change runs.")
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = True,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Show all runs in the browser: live curves, comparisons, sweeps, samples, logs.

    Listens on this machine only, and needs no account and no network. The printed address has the
    token that each request needs.
    Ctrl-C ends the board; runs continue.
    """
    import asyncio

    from rlctl.plugins.console.board.serve import Listening, serve
    from rlctl.runs.store import RunStore

    listening = Listening(host, port, token, read_only)
    asyncio.run(serve(RunStore(root).root, listening, open_page, as_json))
