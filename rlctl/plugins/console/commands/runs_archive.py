"""`rlctl runs export | import`: a run in one file, for another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.console import print_json
from rlctl.cli.options import Json, Root, RunName
from rlctl.cli.startup import announce
from rlctl.cli.stderr import notice
from rlctl.runs.store import RunStore
from rlctl.text import plural, size

app = typer.Typer()

_Archive = Annotated[
    Path, typer.Argument(metavar="FILE", help="Archive: FILE.tar.zst, FILE.tar.gz or FILE.tar.")
]


@app.command(
    "export",
    epilog="""
Examples:

  rlctl runs export @last run.tar.zst

  rlctl runs export ppo-a ppo-a.tar.gz --no-checkpoints
""",
)
def export(
    run: RunName,
    file: _Archive,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints/--no-checkpoints", help="Include the checkpoints.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Write a run into one file: record, metrics, samples, logs, checkpoints."""
    from rlctl.plugins.console.archive import pack

    found = RunStore(root).find(run)
    announce(f"packing {found.name}")
    number = pack(found, file, checkpoints, force)
    num_bytes = file.stat().st_size
    if as_json:
        print_json({"run": found.key, "file": str(file), "files": number, "bytes": num_bytes})
    else:
        notice(f"wrote {plural(number, 'file')} of {found.key} to {file} ({size(num_bytes)})")


@app.command(
    "import",
    epilog="""
Examples:

  rlctl runs import run.tar.zst

  rlctl runs import ppo-a.tar.gz --name ppo-of-anna --root /data/runs
""",
)
def import_run(
    file: _Archive,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the run here; by default the same.")
    ] = None,
    max_gib: Annotated[
        float, typer.Option("--max-gib", min=0, help="Maximum size of the unpacked run, in GiB.")
    ] = 1000.0,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Unpack a run that `rlctl runs export` wrote.

    It appears complete or not at all. Code and folders that its settings name are not used without
    --trust.
    """
    from rlctl.plugins.console.archive import unpack

    announce(f"unpacking {file.name}")
    folder = unpack(file, RunStore(root).root, name, int(max_gib * 2**30))
    if as_json:
        print_json({"run": f"{folder.parent.name}/{folder.name}", "path": str(folder)})
    else:
        notice(f"imported {folder}; `rlctl show {folder.name}` shows it")
