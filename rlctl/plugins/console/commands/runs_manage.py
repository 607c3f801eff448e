"""`rlctl runs rm | restore | pull | trash | tag | note`: management of stored runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.console import print_json, print_table
from rlctl.cli.options import Json, Root, RunName, RunNames
from rlctl.cli.stderr import notice
from rlctl.plugins.console.label_changes import change_tags, set_note
from rlctl.runs.labels import Labels
from rlctl.runs.run import Run
from rlctl.runs.store import RunStore
from rlctl.text import plural

app = typer.Typer()


@app.command("rm", epilog="Example: rlctl runs rm ppo-261121 @failed")
def rm(
    runs: RunNames,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also remove runs that may be active on another host."),
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Move runs to the trash; `rlctl runs restore` restores them."""
    from rlctl.runs import trash

    store = RunStore(root)
    found = list({run.path.resolve(): run for run in map(store.find, runs)}.values())
    for run in found:
        if not (force and run.record and run.record.process.alive(run.path) is None):
            trash.check_removable(run)
    removed: list[dict[str, object]] = []
    for run in found:
        removed.append({"run": run.key, "path": trash.remove(run)})
        if not as_json:
            root_of_run = run.path.absolute().parent.parent
            option = "" if root_of_run == store.root.absolute() else f" --root {root_of_run}"
            notice(f"removed {run.key}; `rlctl runs restore {run.name}{option}` restores it")
    if as_json:
        print_json(removed)


@app.command(epilog="Example: rlctl runs restore ppo-261121")
def restore(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Removed runs by name or prefix."),
    ],
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Restore removed runs from the trash."""
    from rlctl.runs import trash

    restored: list[dict[str, Path]] = []
    for name in names:
        restored.append({"path": trash.restore(RunStore(root).root, name)})
        if not as_json:
            notice(f"restored {restored[-1]['path']}")
    if as_json:
        print_json(restored)


@app.command(epilog="Example: rlctl runs pull s3://bucket/runs/quickstart/ppo-261121")
def pull(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Remote copy: trainer.mirror/<project>/<run>.")
    ],
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Download the remote copy of a run, with its latest complete checkpoint."""
    from rlctl.runtime.training import remote_fetch

    folder = remote_fetch.pull(url, RunStore(root).root)
    if as_json:
        print_json({"path": folder})
        return
    notice(f"downloaded {folder}; `rlctl resume {folder.name}` continues it")


@app.command("trash", epilog="Example: rlctl runs trash --empty")
def show_trash(
    empty: Annotated[
        bool, typer.Option("--empty", help="Delete the removed runs permanently.")
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """List removed runs with their size, or delete them permanently."""
    from rlctl.runs import trash

    folder = RunStore(root).root
    rows = [
        {
            "name": run.key,
            "removed": run.removed.isoformat(timespec="seconds"),
            "bytes": run.num_bytes,
            "path": str(run.path),
        }
        for run in trash.removed_runs(folder)
    ]
    if empty:
        trash.empty(folder)
    if as_json:
        print_json(rows)
    elif not rows:
        notice("the trash is empty")
    else:
        cells = [(row["name"], row["removed"], f"{row['bytes'] / 2**20:.1f} MiB") for row in rows]
        print_table(["run", "removed", "size"], cells, right=["size"])
        if empty:
            notice(f"deleted {plural(len(rows), 'run')}")


@app.command(epilog="Example: rlctl runs tag @last baseline ^draft")
def tag(
    run: RunName,
    tags: Annotated[
        list[str], typer.Argument(metavar="TAG...", help="`TAG` adds a tag, `^TAG` removes it.")
    ],
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Add tags to a run or remove them, for `--where '"TAG" in tags'` and `@tag:TAG`."""
    found = RunStore(root).find(run)
    labels = change_tags(found.path, tags)
    _print_labels(found, labels, ", ".join(labels.tags) or "no tags", as_json)


@app.command(epilog='Example: rlctl runs note @last "reward rose after the warm-up"')
def note(
    run: RunName,
    text: Annotated[str, typer.Argument(help="Text of the note; an empty text removes it.")],
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Set the note of a run."""
    found = RunStore(root).find(run)
    _print_labels(found, set_note(found.path, text), text or "no note", as_json)


def _print_labels(run: Run, labels: Labels, text: str, as_json: bool) -> None:
    if as_json:
        print_json({"name": run.name, **asdict(labels)})
    else:
        notice(f"{run.name}: {text}")
