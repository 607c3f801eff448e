"""`rlctl doctor`: checks of the installation and the machine."""

from __future__ import annotations

import typer

from rlctl.cli.options import Json, Root

app = typer.Typer(add_completion=False)

_STYLES = {"ok": "green", "warning": "bold yellow", "fault": "bold red"}


@app.command(epilog="Example: rlctl doctor")
def doctor(root: Root = None, as_json: Json = False) -> None:
    """Check the installation and suggest a fix for each problem.

    Exits with code 7 if there is a fault.
    """
    import dataclasses

    from rich.text import Text

    from rlctl.cli.console import print_json, stdout, table
    from rlctl.errors import ResourceError
    from rlctl.runs.store import RunStore
    from rlctl.runtime.planning.doctor import examine

    checks = examine(RunStore.at(root).root)
    if as_json:
        print_json([dataclasses.asdict(each) for each in checks])
    else:
        rows = [
            (
                each.check,
                Text(each.state, _STYLES[each.state]),
                each.message + (f"\n→ {each.remedy}" if each.remedy else ""),
            )
            for each in checks
        ]
        stdout().print(table(["check", "state", "found"], rows))
    if any(each.state == "fault" for each in checks):
        raise typer.Exit(ResourceError.exit_code)
