"""`rlctl doctor --bug-report`: a zip archive without secrets and data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli import complete
from rlctl.cli.console import print_json, print_table
from rlctl.cli.options import Json, Root
from rlctl.cli.stderr import notice
from rlctl.errors import UsageError
from rlctl.plugins.console.bug_report import Item, default_name, write_bug_report
from rlctl.runs.store import RunStore

app = typer.Typer()

_EXAMPLES = """
  rlctl doctor --bug-report --run @last
"""


@app.command(epilog=_EXAMPLES)
def doctor_bug_report(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="With --bug-report: the zip file; by default a new one here."
        ),
    ] = None,
    bug_report: Annotated[
        bool,
        typer.Option(
            "--bug-report", help="Write a zip archive for a bug report, without secrets and data."
        ),
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="With --bug-report: add configuration, provenance, events and logs of this run.",
            autocompletion=complete.run,
        ),
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> bool:
    if not bug_report and (file is not None or run is not None):
        raise UsageError("a file or --run needs --bug-report", hint="rlctl doctor --bug-report")
    if file is not None and file.suffix != ".zip":
        raise UsageError(
            f"the archive {str(file)!r} does not end in .zip",
            hint="--run RUN names a run",
            fix=(str(file), ("--run", str(file))),
        )
    if not bug_report:
        return False
    from rlctl.runtime.planning.doctor import examine

    store = RunStore(root)
    chosen = store.find(run) if run is not None else None
    checks = [dataclasses.asdict(check) for check in examine(store.root)]
    target = (file or Path(default_name())).expanduser()
    _print_contents(target, write_bug_report(target, checks, chosen), as_json)
    return True


def _print_contents(target: Path, items: list[Item], as_json: bool) -> None:
    if as_json:
        print_json({"file": target.absolute(), "contents": items})
        return
    rows = [(item.name, f"{item.bytes:,}", item.remark) for item in items]
    print_table(["file", "bytes", "remark"], rows, right=["bytes"])
    notice(f"wrote {target}, without prompts, responses and secrets: look through it first")
