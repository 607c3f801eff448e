"""`rlctl rerun`: a new run from the record of another one."""

from __future__ import annotations

from typing import Annotated

import typer

from rlctl.cli.console import print_json
from rlctl.cli.options import Json, Root, RunName, Trust, overrides_argument
from rlctl.cli.startup import announce, until_start
from rlctl.cli.stderr import notice, warn
from rlctl.runs.store import RunStore
from rlctl.text import plural

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl rerun @last                   the same metrics, if nothing changed

  rlctl rerun ppo-a trainer.seed=2 --name ppo-a-seed-2    one change

  rlctl rerun ppo-a --check           only look for changes
"""

Name = Annotated[
    str | None, typer.Option("--name", help="Name of the new run; by default RUN-rerun.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Train although data, model or code have changed.")
]
Inline = Annotated[
    bool | None,
    typer.Option(
        "--inline/--no-inline", help="Run in this process, without Ray; by default as RUN."
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Look for changes and start nothing.")]


@app.command(epilog=_EXAMPLES)
def rerun(
    run: RunName,
    overrides: Annotated[list[str] | None, overrides_argument("Changes of settings.")] = None,
    name: Name = None,
    check: Check = False,
    force: Force = False,
    inline: Inline = None,
    trust: Trust = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Start a new run from the record of another one, and compare their metrics.

    On a CPU, the metrics are the same, but for times, if data, model, code and versions are. What
    has changed since is an error, and other versions are notes.
    """
    announce("checking the run")
    with until_start() as on_end:
        from rlctl.plugins.console import rerun_plan as again

        found = RunStore(root).find(run)
        recipe = again.compose_again(found, overrides or [], name)
        if not force:
            again.refuse_changes(found, recipe)
        notes = again.notes(found)
        for note in notes:
            notice(note)
        if check:
            if as_json:
                print_json({"of": found.key, "notes": notes})
            elif not force:
                notice(f"data, model and code of {found.name} have not changed")
            return
        from rlctl import api

        if inline is None:
            inline = "--inline" in found.readable_record().command
        new = api.train(recipe, inline=inline, progress=True, on_end=on_end)
    compared = again.compare_metrics(found.path, new.path)
    if as_json:
        document = {"of": found.key, "notes": notes, "run": new.key, "path": str(new.path)}
        print_json(document | compared)
    elif overrides:
        notice(f"`rlctl compare {found.name} {new.name}` shows the difference")
    elif compared["count"] == 0:
        steps = plural(compared["steps"], "step")
        notice(f"all metrics of {steps} equal those of {found.name}, but for times")
    else:
        for row in compared["differ"]:
            one, other = row["values"]
            warn(f"step {row['step']}: {row['metric']} is {other}, and was {one}")
        warn(f"{compared['count']} of {compared['values']} values differ from {found.name}")
