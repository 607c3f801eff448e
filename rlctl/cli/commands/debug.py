"""`rlctl debug`: processes of a running run, and their stacks."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from rlctl.cli.options import Json, Root, RunName
from rlctl.errors import RlctlError
from rlctl.terminal import visible

app = typer.Typer(add_completion=False)


_EXAMPLES = """
Examples:

  rlctl debug @last --stacks

  rlctl debug ppo-261121
"""


@app.command(epilog=_EXAMPLES)
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
    from rlctl.cli.console import print_json, stdout, table
    from rlctl.runs.stacks import run_processes, stacks
    from rlctl.runs.store import RunStore

    found = run_processes(RunStore.at(root).find(run))
    shown = [dataclasses.asdict(process) for process in found]
    failures: list[RlctlError] = []
    for process in shown if with_stacks else ():
        try:
            process["stacks"] = stacks(process["pid"])
        except RlctlError as error:  # one of them may have ended
            failures.append(error)
    if len(failures) == len(shown):
        raise failures[0]
    if as_json:
        print_json(shown)
    elif with_stacks:
        for process in shown:
            typer.echo(f"── {process['pid']} {visible(process['name'])}")
            typer.echo(visible(process.get("stacks", "cannot be read\n")))
    else:
        columns = ["pid", "name", "status", "cpu_s"]
        rows = [[str(row[name]) for name in columns] for row in shown]
        stdout().print(table(columns, rows))
