"""`rlctl doctor`, `loggers`, `version` and `completion`: the installation and the machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from rlctl.cli import complete
from rlctl.cli.console import notice, print_json, print_table
from rlctl.cli.options import Json, Root
from rlctl.errors import ResourceError, UsageError
from rlctl.runs.bug_report import Item, default_name, write_bug_report
from rlctl.runs.store import RunStore

app = typer.Typer()

_STYLES = {"ok": "green", "warning": "bold yellow", "fault": "bold red"}
_LOGGER_STYLES = {"ready": "green", "not installed": "dim", "would not start": "bold red"}
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

    from rlctl.runtime.planning.doctor import examine

    if not bug_report and (file is not None or run is not None):
        raise UsageError("a file or --run needs --bug-report", hint="rlctl doctor --bug-report")
    if file is not None and file.suffix != ".zip":
        raise UsageError(
            f"the archive {str(file)!r} does not end in .zip",
            hint="--run RUN names a run",
            fix=(str(file), ("--run", str(file))),
        )
    store = RunStore(root)
    chosen = store.find(run) if run is not None else None
    checks = [dataclasses.asdict(check) for check in examine(store.root)]
    if bug_report:
        target = file.expanduser() if file is not None else Path(default_name())
        _print_contents(target, write_bug_report(target, checks, chosen), as_json)
        return
    if as_json:
        print_json(checks)
    else:
        _print_checks(checks)
    if any(check["state"] == "fault" for check in checks):
        raise typer.Exit(ResourceError.exit_code)


def _print_checks(checks: list[dict[str, Any]]) -> None:
    rows = [
        (
            check["check"],
            Text(check["state"], _STYLES[check["state"]]),
            check["message"] + (f"\n→ {check['remedy']}" if check["remedy"] else ""),
        )
        for check in checks
    ]
    print_table(["check", "state", "found"], rows)


def _print_contents(target: Path, items: list[Item], as_json: bool) -> None:
    if as_json:
        print_json({"file": target.absolute(), "contents": items})
        return
    rows = [(item.name, f"{item.bytes:,}", item.remark) for item in items]
    print_table(["file", "bytes", "remark"], rows, right=["bytes"])
    notice(f"wrote {target}, without prompts, responses and secrets: look through it first")


@app.command(epilog="Example: rlctl loggers --json")
def loggers(as_json: Json = False) -> None:
    """List the trackers, the mode each would choose, and problems with its settings."""
    from rlctl.tracking.loggers import examine

    states = examine()
    if as_json:
        print_json(states)
        return
    rows = [
        (
            state.name,
            Text(state.state, _LOGGER_STYLES[state.state]),
            state.package,
            state.message + (f"\n→ {state.remedy}" if state.remedy else ""),
        )
        for state in states
    ]
    print_table(["logger", "state", "package", "would be"], rows)


@app.command(epilog="Example: rlctl version --json")
def version(as_json: Json = False) -> None:
    """Show the versions of rlctl and its dependencies."""
    from rlctl.runs.provenance import installed_versions

    versions = installed_versions()
    if as_json:
        from rlctl.cli.json_errors import JSON_VERSION

        print_json({**versions, "json": JSON_VERSION})
        return
    rows = [(name, number or "not installed") for name, number in versions.items()]
    print_table(["package", "version"], rows)


_COMPLETION_EXAMPLES = """
Examples:

  eval "$(rlctl completion bash)"                    in ~/.bashrc

  rlctl completion zsh > ~/.zfunc/_rlctl

  rlctl completion fish > ~/.config/fish/completions/rlctl.fish

  rlctl completion powershell | Out-String | Invoke-Expression
"""


@app.command(epilog=_COMPLETION_EXAMPLES)
def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish", "powershell", "pwsh"], typer.Argument(help="Shell.")
    ],
) -> None:
    """Print the completion script of a shell; `rlctl --install-completion` installs it."""
    from rlctl.cli.shells import completion_script

    typer.echo(completion_script(shell))
