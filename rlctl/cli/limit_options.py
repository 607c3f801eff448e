"""Options `--max-time`, `--save-by` and `--retries`, whose values `Limits` has."""

from __future__ import annotations

from typing import Annotated

import typer

MaxTime = Annotated[
    str | None,
    typer.Option(
        "--max-time",
        metavar="TIME",
        help="Save and exit with code 0 within this time: 3h50m, 90m or 3:50:00.",
    ),
]
SaveBy = Annotated[
    str | None,
    typer.Option(
        "--save-by",
        metavar="WHEN",
        help="Save and exit with code 0 before this time: 23:30 or 2026-11-22T06:00.",
    ),
]
Retries = Annotated[
    int,
    typer.Option(
        "--retries",
        metavar="N",
        min=0,
        help="Restart a crashed run from its latest checkpoint, at most N times.",
    ),
]
