"""`rlctl version`: what is installed, found in the packages' metadata, so that nothing is imported."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def version(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show the versions of rlctl and of what it stands on."""
    from rlctl.cli.console import print_json, stdout, table
    from rlctl.runs.provenance import installed_versions

    versions = installed_versions()
    if as_json:
        print_json(versions)
    else:
        stdout().print(
            table(
                ["package", "version"],
                [(name, number or "not installed") for name, number in versions.items()],
            )
        )
