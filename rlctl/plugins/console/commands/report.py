"""`rlctl report` and `board`: runs as one HTML file, or live in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.console import notice, print_json
from rlctl.cli.options import Json, Root, run_argument
from rlctl.files import write_text

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl report @last                        writes runs/…/report.html

  rlctl report ppo-a ppo-b grpo -o compare.html

  rlctl report my-sweep                     its trials side by side, and its search space
"""


@app.command(epilog=_EXAMPLES)
def report(
    runs: Annotated[
        list[str],
        run_argument("Runs by name or prefix, folder, @last or @failed; or one sweep.", "RUN..."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="File to write; by default report.html in the folder of the run or sweep, "
            "or in the current folder for several runs.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option("--samples", min=0, help="Number of samples per validation."),
    ] = 50,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML file about runs: curves, alarms, samples, settings.

    Prints the path of the file.
    """
    from rlctl.api import find_run_or_sweep, open_run
    from rlctl.runs.compare import distinct
    from rlctl.runs.report.content import content
    from rlctl.runs.report.page import page
    from rlctl.sweeps.record import SweepDir
    from rlctl.sweeps.results import runs_of, search

    first = find_run_or_sweep(runs[0], root) if len(runs) == 1 else None
    sweep = first if isinstance(first, SweepDir) else None
    found = runs_of(sweep) if sweep else distinct([open_run(name, root) for name in runs])
    folder = sweep.path if sweep else found[0].path if len(found) == 1 else Path()
    target = output or folder / "report.html"
    text = page(content(found, samples, search(sweep) if sweep else None))
    try:
        write_text(target, text)
    except OSError as error:
        from rlctl.write_errors import cannot_write

        hint = "-o FILE writes to another place"
        raise cannot_write("the report", target, error, hint) from error
    if as_json:
        print_json({"path": target, "bytes": len(text.encode())})
        return
    typer.echo(target)
    notice(f"{len(text.encode()) / 1e6:.1f} MB; opens in any browser, without a network")


_BOARD_EXAMPLES = """
Examples:

  rlctl board                               opens a browser on this machine

  rlctl board --no-open --port 0 --json     prints the address as JSON, for scripts

  rlctl board --host 0.0.0.0 --read-only    for others in the network, with a token, without buttons

On a remote machine: ssh -L 8420:127.0.0.1:8420 HOST rlctl board --no-open
"""


@app.command(epilog=_BOARD_EXAMPLES)
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

    from rlctl.board.serve import Listening, serve
    from rlctl.runs.store import RunStore

    listening = Listening(host, port, token, read_only)
    asyncio.run(serve(RunStore(root).root, listening, open_page, as_json))
