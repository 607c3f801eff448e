"""`rlctl watch` and `rlctl logs`: what a run does now, from any shell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli import complete, remote

app = typer.Typer(add_completion=False)

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's name or the beginning of it, its folder, @last or @failed.",
        autocompletion=complete.run,
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        envvar="RLCTL_RUNS",
        help="The folder of all runs.  [default: runs]",
        show_default=False,
    ),
]


@app.command(epilog="\nExamples:\n\n  rlctl watch @last\n\n  rlctl watch ppo-a | grep val\n")
def watch(run: RunName, root: Root = None) -> None:
    """Watch a run until it ends, also one that was started elsewhere on this disk.

    On a terminal a live panel, otherwise one line a step. Ctrl-C ends the watching, not the run.
    """
    from rlctl.cli.console import notice, stdout
    from rlctl.runs.store import RunStore
    from rlctl.runs.watch import RunWatcher
    from rlctl.tracking.console import is_terminal, live_display

    watched = RunWatcher(RunStore.at(root).find(run))
    if is_terminal(stdout()):
        with live_display(stdout(), watched.panel):
            for _ in watched.follow():
                pass
        stdout().print(watched.panel)
    else:
        for alarm in watched.follow():
            print(
                watched.panel.line()
                if alarm is None
                else f"{'alarm over' if alarm.over else 'alarm'}: {alarm}",
                flush=True,
            )
    name = watched.run.name
    notice(
        f"{name} is {watched.run.state}; `rlctl show {name}` and `rlctl report {name}` tell more"
    )


@app.command(
    epilog="\nExamples:\n\n  rlctl logs @last -f\n\n  rlctl logs @failed --role actor --rank 0 -n 50\n"
)
def logs(
    run: RunName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is added, until the run ends.")
    ] = False,
    role: Annotated[
        str | None,
        typer.Option(
            "--role", help="Only the processes of this role or pool: actor, critic, main, …."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Only the process of this rank.")
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", min=1, help="An earlier attempt instead of the newest."),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("-n", "--lines", min=0, help="Only the last lines of each process."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="ADDRESS",
            help="Follow the job of this name on a Ray cluster instead.",
        ),
    ] = None,
    root: Root = None,
) -> None:
    """Print what the worker processes of a run printed.

    Of several processes each line begins with the name of its own: pool and rank.
    """
    from rlctl.cli.console import notice
    from rlctl.runs import logs as stored
    from rlctl.runs.store import RunStore

    if address is not None:
        remote.follow(address, run)
        return
    found = RunStore.at(root).find(run)
    files = stored.log_files(found, attempt, role, rank)
    width = max(len(path.stem) for path in files)
    empty = True
    for process, line in (
        stored.follow(found, files, last) if follow else stored.lines_of(files, last)
    ):
        empty = False
        sys.stdout.write((f"{process:{width}} | " if len(files) > 1 else "") + line + "\n")
        if follow:
            sys.stdout.flush()
    if empty:
        notice(f"nothing was printed to {', '.join(map(str, files))}")
