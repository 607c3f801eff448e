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
        help="Do not wait: run in the background of this machine, or as the job of --address.",
    ),
]
Slurm = Annotated[
    str | None,
    typer.Option(
        "--slurm",
        metavar="OPTIONS",
        help="Run as a job of SLURM, resumed after its time limit: 'nodes=2 time=24:00:00'.",
    ),
]


def launched(context: typer.Context, slurm: str | None, detach: bool) -> bool:
    """Start the command as a job of SLURM or in the background, if it is to; return True then."""
    if slurm is None and (not detach or context.params["address"] is not None):
        return False
    from rlctl import plugins

    for name in plugins.names("launchers"):
        plugins.load("launchers", name)(context, slurm)
        return True
    hint = "leave them out"
    raise UsageError("--detach without --address, and --slurm, are not installed here", hint=hint)


def check_options(address: str | None, local: bool) -> None:
    """Refuse options of this machine (`local`) with --address."""
    if address is not None and local:
        raise UsageError(
            "--address cannot be combined with --inline, --dry-run or --json",
            hint="leave out --address",
        )
