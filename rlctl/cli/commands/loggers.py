"""`rlctl loggers`: the trackers that are there, and what each would do here and now."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

_STYLES = {"ready": "green", "not installed": "dim", "would not start": "bold red"}


@app.command()
def loggers(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
) -> None:
    """List the trackers of runs: installed or not, the mode each would choose, and what is wrong with its settings."""
    import dataclasses

    from rich.text import Text

    from rlctl.cli.console import print_json, stdout, table
    from rlctl.tracking.fanout import examine

    found = examine()
    if as_json:
        print_json([dataclasses.asdict(each) for each in found])
        return
    rows = [
        (
            each.name,
            Text(each.state, _STYLES[each.state]),
            each.package,
            each.message + (f"\n→ {each.remedy}" if each.remedy else ""),
        )
        for each in found
    ]
    stdout().print(table(["logger", "state", "package", "would be"], rows))
