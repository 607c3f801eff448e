"""`rlctl show --diff`: settings, code and packages of a run against another one, or the present."""

from __future__ import annotations

from typing import Annotated

import typer

from rlctl.cli.console import print_json, print_table, stdout
from rlctl.cli.options import Json, Root, RunName, run_argument
from rlctl.cli.stderr import notice
from rlctl.cli.table_forms import Format
from rlctl.cli.views.runs import short
from rlctl.errors import UsageError
from rlctl.runs.store import RunStore
from rlctl.terminal import visible

app = typer.Typer()

_HELP = """--diff prints what differs between the run and OTHER: settings, uncommitted changes, your
files and packages. Without OTHER it prints the run's uncommitted changes, and what differs now."""
_EXAMPLES = """
  rlctl show @last --diff                           since the run was started

  rlctl show ppo-a --diff ppo-b
"""

Other = Annotated[str | None, run_argument("With --diff: the other run; by default now.", "OTHER")]
Diff = Annotated[
    bool, typer.Option("--diff", help="Print differences in settings, code and packages to OTHER.")
]


@app.command(epilog=_EXAMPLES, help=_HELP)
def show_diff(
    run: RunName,
    other: Other = None,
    diff: Diff = False,
    form: Format = "table",
    root: Root = None,
    as_json: Json = False,
) -> bool:
    """Print the differences; return False without --diff."""
    if not diff and other is None:
        return False
    if not diff:
        raise UsageError(
            "two runs need --diff", hint=f"rlctl show {run} --diff {other}, or rlctl compare"
        )
    from rlctl.plugins.console.evidence_diff import Evidence, may_read, without_effect

    store = RunStore(root)
    found = store.find(run)
    second = None
    if other is not None:
        second = store.find(other)
    evidence = Evidence.of(found)
    against = Evidence.present(found) if second is None else Evidence.of(second)
    compared = evidence.compared(against)
    patch = compared["patch"]
    unread = without_effect(found, second, compared["settings"])
    compared["without_effect"] = unread
    compares_files = True
    if second is None:
        compares_files = may_read(found)
        compared["changes"] = patch = evidence.patch
        compared["compares_files"] = compares_files
    if as_json or form == "json":
        print_json(compared)
        return True
    for key in unread:
        del compared["settings"][key]
    for section in ("settings", "environment"):
        if rows := [[key, *map(short, pair)] for key, pair in compared[section].items()]:
            print_table([section, evidence.name, against.name], rows)
    for text in filter(None, (patch, *compared["files"].values())):
        for line in text.splitlines():
            style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
            stdout().print(visible(line), style=style, markup=False, highlight=False)
    if unread:
        notice(f"settings that differ and have no effect: {', '.join(unread)}")
    if not compares_files:
        notice(
            f"{found.name} is not a run of yours, so today's files are not compared; "
            f"RLCTL_TRUSTED={found.path.resolve()} does that"
        )
    if not (patch or any(compared[name] for name in ("settings", "environment", "files"))):
        notice(f"{evidence.name} and {against.name} do not differ")
    return True
