"""`rlctl runs prune`: remove checkpoints, keep records."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.console import print_json, print_table
from rlctl.cli.options import Json, Root, RunNames
from rlctl.cli.stderr import notice
from rlctl.errors import UsageError
from rlctl.runs.store import RunStore
from rlctl.text import plural, size

if TYPE_CHECKING:
    from rlctl.runs.prune import Pruning

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl runs prune ppo-261121 --dry-run

  rlctl runs prune ppo-261121 grpo-261122 --keep best,last --yes

  rlctl runs prune @last --keep last:3,40
"""


@app.command("prune", epilog=_EXAMPLES)
def prune(
    runs: RunNames,
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            metavar="WHICH",
            help="Checkpoints to keep: best, last, last:N, step numbers, separated by commas; or "
            "none.",
        ),
    ] = "best,last",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed; remove nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also remove what an unfinished run or a fork would start from."
        ),
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Remove checkpoints of runs for good; metrics, samples and settings stay.

    Asks on a terminal; without one it needs --yes or --dry-run.
    """
    from rlctl.runs import prune as pruning

    store = RunStore(root)
    wanted = pruning.Keep.parse(keep)
    found = {run.path.resolve(): run for run in map(store.find, runs)}
    every = store.runs()
    plans = [pruning.plan(run, wanted, every, force) for run in found.values()]
    if as_json:
        _confirm(plans, dry_run, yes, can_ask=False)
    else:
        _print(plans)
        _confirm(plans, dry_run, yes, sys.stdin.isatty() and sys.stderr.isatty())
    if not dry_run:
        for planned in plans:
            pruning.prune(planned)
    if as_json:
        print_json([_entry(planned, dry_run) for planned in plans])
    elif not dry_run and any(planned.remove for planned in plans):
        notice(f"removed {_total(plans)}")


def _confirm(plans: list[Pruning], dry_run: bool, yes: bool, can_ask: bool) -> None:
    """Ask before a removal. Raises UsageError if nobody can be asked, and Exit for a no."""
    if dry_run or yes or not any(pruning.remove for pruning in plans):
        return
    if not can_ask:
        raise UsageError(
            f"nothing is asked without a terminal, and {_total(plans)} would be removed for good",
            hint="--yes removes them, --dry-run lists them",
        )
    if not typer.confirm(f"Remove {_total(plans)} for good?", False, err=True):
        raise typer.Exit(1)


def _print(plans: list[Pruning]) -> None:
    rows = [
        (
            pruning.run.key,
            ", ".join(map(str, pruning.remove)) or "-",
            size(sum(pruning.remove.values())),
            ", ".join(map(str, pruning.keep)) or "-",
        )
        for pruning in plans
    ]
    print_table(["run", "remove steps", "size", "keep steps"], rows, right=["size"])
    for pruning in plans:
        for step, reason in pruning.guarded.items():
            notice(f"{pruning.run.key} keeps step {step}: {reason}")


def _total(plans: list[Pruning]) -> str:
    number = sum(len(pruning.remove) for pruning in plans)
    return f"{plural(number, 'checkpoint')}, {size(sum(sum(p.remove.values()) for p in plans))}"


def _entry(pruning: Pruning, dry_run: bool) -> dict[str, Any]:
    return {
        "run": pruning.run.key,
        "removed": [] if dry_run else list(pruning.remove),
        "would_remove": list(pruning.remove) if dry_run else [],
        "kept": pruning.keep,
        "bytes": sum(pruning.remove.values()),
        "guarded": {str(step): reason for step, reason in pruning.guarded.items()},
    }
