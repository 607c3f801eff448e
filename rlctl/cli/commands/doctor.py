"""`rlctl doctor`: whether this machine and this installation can train, and what to do where they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

_STYLES = {"ok": "green", "warning": "bold yellow", "fault": "bold red"}


@app.command()
def doctor(
    root: Annotated[
        Path | None,
        typer.Option(
            "--root",
            envvar="RLCTL_RUNS",
            help="The folder of all runs.  [default: runs]",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
) -> None:
    """Examine the installation and the machine, with the command that mends each fault."""
    import dataclasses

    from rich.text import Text

    from rlctl.cli.console import print_json, stdout, table
    from rlctl.errors import ResourceError
    from rlctl.runs.store import RunStore
    from rlctl.runtime.planning.doctor import examine

    findings = examine(RunStore.at(root).root)
    if as_json:
        print_json([dataclasses.asdict(each) for each in findings])
    else:
        rows = [
            (
                each.check,
                Text(each.state, _STYLES[each.state]),
                each.message + (f"\n→ {each.remedy}" if each.remedy else ""),
            )
            for each in findings
        ]
        stdout().print(table(["check", "state", "found"], rows))
    if any(each.state == "fault" for each in findings):
        raise typer.Exit(ResourceError.exit_code)
