"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli import complete

RUNS_VARIABLE = "RLCTL_RUNS"

Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        envvar=RUNS_VARIABLE,
        help="Folder of all runs; by default `runs`.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
DryRunJson = Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON to stdout.")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run by name or prefix, folder, @last, @failed, @best:METRIC or @tag:TAG.",
        autocompletion=complete.run,
    ),
]
RunNames = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Runs by name or prefix, folder, @last, @failed, @best:METRIC or @tag:TAG.",
        autocompletion=complete.run,
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Treat keys that are set but have no effect as errors."),
]
