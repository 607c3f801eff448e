"""Option `--address`, which runs a command as a Ray job on another cluster: see `remote_jobs`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlctl.errors import UsageError

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="Run on this Ray cluster, as a Ray job: auto, ray://HOST:10001 or http://HOST:8265.",
    ),
]
Detach = Annotated[
    bool,
    typer.Option(
        "--detach",
        help="With --address: do not wait; `rlctl logs NAME -f --address …` follows the job.",
    ),
]


def check_options(address: str | None, detach: bool, local: bool) -> None:
    """Refuse --detach without --address, and with it options of this machine (`local`)."""
    if address is None and detach:
        raise UsageError("--detach needs --address", hint="leave out --detach")
    if address is not None and local:
        raise UsageError(
            "--address cannot be combined with --inline, --dry-run or --json",
            hint="leave out --address",
        )
