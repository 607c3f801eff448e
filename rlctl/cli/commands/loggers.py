"""`rlctl loggers`: the installed trackers and the mode that each would choose."""

from __future__ import annotations

import typer

from rlctl.cli.options import Json

app = typer.Typer(add_completion=False)

_STYLES = {"ready": "green", "not installed": "dim", "would not start": "bold red"}


@app.command(epilog="Example: rlctl loggers --json")
def loggers(as_json: Json = False) -> None:
    """List the trackers, the mode each would choose, and problems with its settings."""
    import dataclasses

    from rich.text import Text

    from rlctl.cli.console import print_json, stdout, table
    from rlctl.tracking.loggers import examine

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
