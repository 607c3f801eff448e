"""`rlctl version`: installed versions, read from package metadata without importing packages."""

from __future__ import annotations

import typer

from rlctl.cli.options import Json

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: rlctl version --json")
def version(as_json: Json = False) -> None:
    """Show the versions of rlctl and its dependencies."""
    from rlctl.cli.console import print_json, stdout, table
    from rlctl.runs.provenance import installed_versions

    versions = installed_versions()
    if as_json:
        print_json(versions)
        return
    rows = [(name, number or "not installed") for name, number in versions.items()]
    stdout().print(table(["package", "version"], rows))
