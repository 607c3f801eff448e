"""`rlctl import`: recipes from the scripts of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.console import print_json
from rlctl.cli.options import Json
from rlctl.cli.stderr import notice
from rlctl.errors import ConfigError, ConflictError
from rlctl.files import write_text

app = typer.Typer(help="Turn a script of verl into a recipe.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Turn a script of verl into a recipe."""


_EXAMPLES = """
Examples:

  rlctl import verl run_qwen2-7b.sh -o mine.yaml   for --recipe mine.yaml

  rlctl import verl run_qwen2-7b.sh --json         what became of each key
"""


@app.command("verl", epilog=_EXAMPLES)
def import_verl(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="Shell script that starts verl; it is not run.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write the recipe to; by default stdout."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Json = False,
) -> None:
    """Turn a script of verl into a recipe; list renamed, dropped and refused keys.

    Refused settings are left out of the recipe and named in its comments, and the exit code is 3.
    """
    from rlctl.cli.json_errors import document_with_error
    from rlctl.plugins.bridges.verl.script import import_script

    imported = import_script(script)
    error = ConfigError(*imported.problems) if imported.problems else None
    if output is not None:
        if output.exists() and not force:
            raise ConflictError(f"{output} exists already", hint="overwrite it with --force")
        try:
            write_text(output, imported.text())
        except OSError as error:
            from rlctl.write_errors import cannot_write

            raise cannot_write("the recipe", output, error) from error
    if as_json:
        rows = [
            {"kind": setting.kind, "key": setting.key, "value": setting.value, "text": setting.text}
            for setting in imported.settings
        ]
        document = {
            "verb": imported.verb,
            "base": imported.base,
            "recipe": imported.text(),
            "settings": rows,
            "not_expanded": imported.unread,
            "notes": imported.notes,
        }
        if error is not None:
            document = document_with_error(document, error)
        print_json(document)
    else:
        if output is None:
            typer.echo(imported.text(), nl=False)
        for setting in imported.settings:
            if setting.kind != "refused":
                notice(f"{setting.kind:8} {setting.given}: {setting.text}")
        for text in imported.unread:
            notice(f"not expanded: {text}")
        for text in imported.notes:
            notice(text)
        if output is not None:
            done = "next" if error is None else "written, with faults; when they are repaired"
            notice(f"{done}: rlctl train {imported.verb} --recipe {output} --dry-run")
    if error is not None:
        raise error
