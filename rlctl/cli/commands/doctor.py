"""`rlctl doctor`, `loggers`, `version` and `completion`: the installation and the machine."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from rlctl.cli.console import print_json, print_table
from rlctl.cli.options import Json, Root
from rlctl.errors import ResourceError
from rlctl.runs.store import RunStore

app = typer.Typer()

_STYLES = {"ok": "green", "warning": "bold yellow", "fault": "bold red"}
_LOGGER_STYLES = {"ready": "green", "not installed": "dim", "would not start": "bold red"}
_EXAMPLES = """
Examples:

  rlctl doctor
"""


@app.command(epilog=_EXAMPLES)
def doctor(
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Check the installation and suggest a fix for each problem.

    Exits with code 7 if there is a fault.
    """

    from rlctl.runtime.planning.doctor import examine

    checks = [dataclasses.asdict(check) for check in examine(RunStore(root).root)]
    if as_json:
        print_json(checks)
    else:
        _print_checks(checks)
    if any(check["state"] == "fault" for check in checks):
        raise typer.Exit(ResourceError.exit_code)


def _with_remedy(message: str, remedy: str | None) -> str:
    if not remedy:
        return message
    return f"{message}\n→ {remedy}"


def _print_checks(checks: list[dict[str, Any]]) -> None:
    rows = [
        (
            check["check"],
            Text(check["state"], _STYLES[check["state"]]),
            _with_remedy(check["message"], check["remedy"]),
        )
        for check in checks
    ]
    print_table(["check", "state", "found"], rows)


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
            _with_remedy(state.message, state.remedy),
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
    """Print a shell's completion script; `rlctl --install-completion` adds it."""
    from rlctl.cli.shells import completion_script

    typer.echo(completion_script(shell))
