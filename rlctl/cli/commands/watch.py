"""`rlctl watch`, `logs`, `stop` and `debug`: a run that another process drives, from any shell."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.console import print_json, print_table, stdout
from rlctl.cli.options import Json, Root, RunName, RunNames
from rlctl.cli.stderr import notice
from rlctl.errors import RlctlError, UsageError
from rlctl.runs.run import Run
from rlctl.runs.stop import StopTarget, request_stop, run_target, wait
from rlctl.runs.store import RunStore
from rlctl.terminal import visible

if TYPE_CHECKING:
    from rlctl.sweeps.sweep_record import SweepDir


app = typer.Typer()

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


_WATCH_EXAMPLES = """
Examples:

  rlctl watch @last

  rlctl watch ppo-a | grep val

  rlctl watch my-sweep               all trials, step by step

  rlctl watch my-sweep-3             trial 3, all seeds
"""


@app.command(epilog=_WATCH_EXAMPLES)
def watch(run: RunName, root: Root = None) -> None:
    """Watch a run, a sweep or one of its trials until it ends, from any shell.

    Shows a live panel on a terminal, else one line per step. Ctrl-C does not stop the run.
    """
    from rlctl.cli.views.sweep_watch import watch_sweep
    from rlctl.runs.run_watcher import RunWatcher
    from rlctl.sweeps.selection import find_watched
    from rlctl.tracking.console_tracker import is_terminal, live_display

    found = find_watched(RunStore(root), run)
    if not isinstance(found, Run):
        watch_sweep(*found)
        return
    watched = RunWatcher(found)
    if is_terminal(stdout()):
        with live_display(stdout(), watched.panel):
            for _ in watched.follow():
                pass
        stdout().print(watched.panel)
    else:
        for alarm in watched.follow():
            typer.echo(visible(watched.line(alarm)))
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
    from rlctl.runs import logs as stored

    if address is not None:
        if as_json:
            raise UsageError(
                "--json cannot be combined with --address", hint="leave out one of them"
            )
        from rlctl.cli.remote_jobs import follow as follow_job

        follow_job(address, run, sys.stdout)
        return
    found = RunStore(root).find(run)
    files = stored.log_files(found, attempt, role, rank)
    width = max(len(path.stem) for path in files)
    empty = True
    read = stored.follow(found, files, last) if follow else stored.lines_of(files, last)
    for process, line in read:
        empty = False
        if as_json:
            text = json.dumps({"process": process, "line": line}, ensure_ascii=False)
        elif len(files) > 1:
            text = f"{process:{width}} | {visible(line)}"
        else:
            text = visible(line)
        sys.stdout.write(text + "\n")
        if follow:
            sys.stdout.flush()
    if empty:
        notice(f"no output in {', '.join(map(str, files))}")


_STOP_EXAMPLES = """
Examples:

  rlctl stop ppo-261121

  rlctl stop my-sweep

  rlctl stop @last --now
"""


@app.command(epilog=_STOP_EXAMPLES)
def stop(
    runs: RunNames,
    now: Annotated[
        bool,
        typer.Option(
            "--now",
            help="Interrupt the current step; `rlctl resume` continues from the last checkpoint.",
        ),
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=1, help="Time to wait until they end."),
    ] = 300.0,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Stop runs or sweeps after the current step, save, and wait until they end.

    `rlctl resume` continues them.
    """
    from rlctl.api import find_run_or_sweep

    found = [_stop_target(find_run_or_sweep(name, root)) for name in runs]
    for target in found:
        request_stop(target, now)
    ends: list[dict[str, str]] = []
    for target in found:
        ends.append({"name": target.name, "state": wait(target, timeout_s)})
        if not as_json:
            notice("{name}: {state}".format_map(ends[-1]))
    if as_json:
        print_json(ends)


def _stop_target(target: Run | SweepDir) -> StopTarget:
    from rlctl.sweeps.sweep_record import SweepDir

    if not isinstance(target, SweepDir):
        return run_target(target)
    record = target.record
    folder = target.path
    return StopTarget(record.name, folder, record.process, lambda: SweepDir(folder).state, None)


_DEBUG_EXAMPLES = """
Examples:

  rlctl debug @last --stacks

  rlctl debug ppo-261121
"""


@app.command(epilog=_DEBUG_EXAMPLES)
def debug(
    run: RunName,
    with_stacks: Annotated[
        bool, typer.Option("--stacks", help="Print the stacks of all threads, by py-spy.")
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """List the processes of a running run, or print their stacks.

    It shows those of this machine. A process is stopped for some milliseconds, and then continues.
    """
    from rlctl.runs.stacks import run_processes

    found = run_processes(RunStore(root).find(run))
    shown = [dataclasses.asdict(process) for process in found]
    if with_stacks:
        _add_stacks(shown)
    if as_json:
        print_json(shown)
    elif with_stacks:
        for process in shown:
            typer.echo(f"── {process['pid']} {visible(process['name'])}")
            typer.echo(visible(process.get("stacks", "cannot be read\n")))
    else:
        columns = ["pid", "name", "status", "cpu_s"]
        rows = [[str(row[name]) for name in columns] for row in shown]
        print_table(columns, rows)


def _add_stacks(processes: Sequence[dict[str, Any]]) -> None:
    """Add the stacks of each process. Raises RlctlError if none can be read."""
    from rlctl.runs.stacks import stacks

    failures: list[RlctlError] = []
    for process in processes:
        try:
            process["stacks"] = stacks(process["pid"])
        except RlctlError as error:  # one of them may have ended
            failures.append(error)
    if failures and len(failures) == len(processes):
        raise failures[0]
