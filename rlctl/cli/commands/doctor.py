"""`rlctl doctor`: checks of the installation and the machine, and the archive of a bug report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli import complete
from rlctl.cli.options import Json, Root

if TYPE_CHECKING:
    from rlctl.runs.bug_report import Item

app = typer.Typer(add_completion=False)

_STYLES = {"ok": "green", "warning": "bold yellow", "fault": "bold red"}
_EXAMPLES = """
Examples:

  rlctl doctor

  rlctl doctor --bug-report --run @last
"""


@app.command(epilog=_EXAMPLES)
def doctor(
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
) -> None:
    """Check the installation and suggest a fix for each problem.

    Exits with code 7 if there is a fault.
    """
    import dataclasses

    from rlctl.cli.console import print_json
    from rlctl.errors import ResourceError, UsageError
    from rlctl.runs.store import RunStore
    from rlctl.runtime.planning.doctor import examine

    if not bug_report and (file is not None or run is not None):
        raise UsageError("a file or --run needs --bug-report", hint="rlctl doctor --bug-report")
    if file is not None and file.suffix != ".zip":
        raise UsageError(
            f"the archive {str(file)!r} does not end in .zip",
            hint="--run RUN names a run",
            fix=(str(file), ("--run", str(file))),
        )
    store = RunStore.at(root)
    chosen = store.find(run) if run is not None else None
    checks = [dataclasses.asdict(each) for each in examine(store.root)]
    if bug_report:
        from rlctl.runs.bug_report import default_name, write_bug_report

        target = file.expanduser() if file is not None else Path(default_name())
        _print_contents(target, write_bug_report(target, checks, chosen), as_json)
        return
    if as_json:
        print_json(checks)
    else:
        _print_checks(checks)
    if any(each["state"] == "fault" for each in checks):
        raise typer.Exit(ResourceError.exit_code)


def _print_checks(checks: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from rlctl.cli.console import stdout, table

    rows = [
        (
            each["check"],
            Text(each["state"], _STYLES[each["state"]]),
            each["message"] + (f"\n→ {each['remedy']}" if each["remedy"] else ""),
        )
        for each in checks
    ]
    stdout().print(table(["check", "state", "found"], rows))


def _print_contents(target: Path, items: list[Item], as_json: bool) -> None:
    import dataclasses

    from rlctl.cli.console import notice, print_json, stdout, table

    if as_json:
        contents = [dataclasses.asdict(each) for each in items]
        print_json({"file": str(target.absolute()), "contents": contents})
        return
    rows = [(each.name, f"{each.bytes:,}", each.remark) for each in items]
    stdout().print(table(["file", "bytes", "remark"], rows, right=["bytes"]))
    notice(f"wrote {target}, without prompts, responses and secrets: look through it first")
