"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli import complete

Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        envvar="RLCTL_RUNS",
        help="The folder of all runs.  [default: runs]",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="As JSON on stdout.")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's name or the beginning of it, its folder, @last, @failed, @best:METRIC or @tag:TAG.",
        autocompletion=complete.run,
    ),
]
RunNames = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="Runs, each as `rlctl show` takes it.", autocompletion=complete.run
    ),
]
