"""`rlctl sweeps`: the list of sweeps."""

from __future__ import annotations

import typer

from rlctl.cli.options import Json, Root

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: rlctl sweeps --json")
def sweeps(root: Root = None, as_json: Json = False) -> None:
    """List the sweeps, newest first."""
    from rlctl.cli.console import print_json
    from rlctl.cli.views import sweep as sweep_view
    from rlctl.runs.store import DEFAULT_ROOT
    from rlctl.sweeps import record, results

    found = [results.overview(each) for each in record.sweeps(root or DEFAULT_ROOT)]
    print_json(found) if as_json else sweep_view.print_sweeps(found)
