"""`rlctl watch` and `rlctl logs`: progress and output of a run, from any shell."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from rlctl.cli import remote
from rlctl.cli.options import Root, RunName
from rlctl.errors import UsageError
from rlctl.terminal import visible

app = typer.Typer(add_completion=False)

JobAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="Follow the job of this name on a Ray cluster instead.",
    ),
]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line of output.")
]


@app.command(epilog="\nExamples:\n\n  rlctl watch @last\n\n  rlctl watch ppo-a | grep val\n")
def watch(run: RunName, root: Root = None) -> None:
    """Watch a run until it ends, including one that another process started.

    Shows a live panel on a terminal, else one line per step. Ctrl-C does not stop the run.
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
            kind = "alarm over" if alarm and alarm.over else "alarm"
            typer.echo(visible(f"{kind}: {alarm}") if alarm else watched.panel.line())
    name = watched.run.name
    notice(
        f"{name} is {watched.run.state}; `rlctl show {name}` and `rlctl report {name}` show details"
    )


@app.command(
    epilog="""
Examples:

  rlctl logs @last -f

  rlctl logs @failed --role actor --rank 0 -n 50
"""
)
def logs(
    run: RunName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    role: Annotated[
        str | None,
        typer.Option(
            "--role", help="Print only processes of this role or pool, such as actor or main."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Print only the process of this rank.")
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", min=1, help="Number of an attempt; by default the latest."),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("-n", "--lines", min=0, help="Print only the last lines of each process."),
    ] = None,
    address: JobAddress = None,
    root: Root = None,
    as_json: JsonLines = False,
) -> None:
    """Print the output of a run's worker processes.

    With several processes, each line starts with the pool and rank of its process.
    """
    from rlctl.cli.console import notice
    from rlctl.runs import logs as stored
    from rlctl.runs.store import RunStore

    if address is not None:
        if as_json:
            raise UsageError(
                "--json cannot be combined with --address", hint="leave out one of them"
            )
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
        if as_json:
            text = json.dumps({"process": process, "line": line}, ensure_ascii=False)
        else:
            text = (f"{process:{width}} | " if len(files) > 1 else "") + visible(line)
        sys.stdout.write(text + "\n")
        if follow:
            sys.stdout.flush()
    if empty:
        notice(f"no output in {', '.join(map(str, files))}")
