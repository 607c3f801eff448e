"""`rlctl runs sync`: send to trackers what they miss."""

from __future__ import annotations

from typing import Annotated

import typer

from rlctl.cli import complete
from rlctl.cli.console import print_json
from rlctl.cli.options import Json, Root, RunName
from rlctl.cli.stderr import notice
from rlctl.runs.store import RunStore

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl runs sync @last --logger wandb        steps that were not sent

  rlctl runs sync ppo-261121 -l tensorboard   all, to another tracker

  rlctl runs sync ppo-sweep-261121 -l swanlab       all runs of a sweep
"""


@app.command(epilog=_EXAMPLES)
def sync(
    run: RunName,
    logger: Annotated[
        list[str],
        typer.Option(
            "--logger",
            "-l",
            help="Tracker to send to; repeat for several.",
            autocompletion=complete.logger,
        ),
    ],
    first: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, help="Send all steps from this one, including those already sent."
        ),
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Send the missing steps of a finished run, or of a sweep's runs, to trackers."""
    from rlctl.plugins.console.sync import sync_named

    sent = sync_named(RunStore(root), run, list(dict.fromkeys(logger)), first)
    if as_json:
        print_json(list(sent))
        return
    for synced in sent:
        notice(f"{synced.run}: {synced}")
