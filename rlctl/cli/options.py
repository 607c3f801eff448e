"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlctl.cli import complete

RUNS_VARIABLE = "RLCTL_RUNS"

Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        envvar=RUNS_VARIABLE,
        help="Folder of all runs; by default `runs`.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
DryRunJson = Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON to stdout.")]


def _trust(given: bool) -> None:
    if given:
        from rlctl.runs.trust import trust_all

        trust_all()


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=_trust,
        is_eager=True,
        help="Use code that a run's configuration names, even if somebody else made the run.",
    ),
]


def run_argument(help: str, metavar: str | None = None) -> Any:
    """Return an argument that names a run or several."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete.run)


def overrides_argument(help: str, metavar: str = "[KEY=VALUE]...") -> Any:
    """Return an argument for overrides of settings."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete.override)


def set_option(help: str) -> Any:
    """Return the option for overrides of a command whose arguments are others."""
    return typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help=help, autocompletion=complete.override
    )


def recipe_option(help: str, metavar: str | None = None) -> Any:
    """Return the option for a recipe by name or file."""
    return typer.Option(
        "--recipe", "-r", metavar=metavar, help=help, autocompletion=complete.recipe
    )


_SELECTORS = "by name or prefix, folder, @last, @failed, @best:METRIC or @tag:TAG."
RunName = Annotated[str, run_argument(f"Run {_SELECTORS}", "RUN")]
RunNames = Annotated[list[str], run_argument(f"Runs {_SELECTORS}", "RUN...")]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Treat keys that are set but have no effect as errors."),
]
