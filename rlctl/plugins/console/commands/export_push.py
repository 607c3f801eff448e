"""`rlctl export --push`: the exported folder in a repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.commands.export import Folder, Force, Lora, Step, find_run, write_folder
from rlctl.cli.console import print_json
from rlctl.cli.options import Json, Root, RunName, Trust
from rlctl.cli.startup import announce
from rlctl.cli.stderr import notice
from rlctl.text import count

if TYPE_CHECKING:
    from rlctl.plugins.console.push import HubRepo

app = typer.Typer()

_HELP = """--push commits it to a model
repository, with the token of HF_TOKEN or `hf auth login`."""
_EXAMPLES = """
  rlctl export @last my-model --push my-org/my-model --private

  rlctl export @last card --card-only --push my-org/my-model   its README.md
"""

_Push = Annotated[
    str | None,
    typer.Option(
        "--push", metavar="ORG/NAME", help="Then push the folder to the Hugging Face hub."
    ),
]
_Private = Annotated[
    bool, typer.Option("--private", help="With --push: create a private repository.")
]
_CardOnly = Annotated[
    bool, typer.Option("--card-only", help="Write, and push, only the model card README.md.")
]


@app.command(epilog=_EXAMPLES, help=_HELP)
def export_push(
    run: RunName,
    folder: Folder,
    step: Step = None,
    lora: Lora = "merged",
    force: Force = False,
    push: _Push = None,
    private: _Private = False,
    card_only: _CardOnly = False,
    trust: Trust = False,
    as_json: Json = False,
    root: Root = None,
) -> bool:
    """Export a run and push the folder; return False if neither a push nor a card is asked for."""
    if private and push is None:
        from rlctl.errors import UsageError

        raise UsageError("--private needs --push", hint="--push ORG/NAME --private")
    if push is None and not card_only:
        return False
    announce("reading the checkpoint")
    found = find_run(root, run, folder)
    # The repository is checked before the export, which may take minutes.
    repo = None if push is None else _checked(push, private)
    result = write_folder(found, step, folder, lora, force, card_only)
    if repo is not None:
        message = f"{found.name} after step {result['step']}"
        result |= _push(repo, folder.expanduser(), message, card_only)
    if as_json:
        print_json(result)
    return True


def _checked(name: str, private: bool) -> HubRepo:
    """Return the repository to push to, after a notice if it exists."""
    from rlctl.plugins.console.push import find_repo

    repo = find_repo(name, private)
    if repo.exists:
        notice(f"{name} exists: the push adds a commit to it")
    return repo


def _push(repo: HubRepo, folder: Path, message: str, card_only: bool) -> dict[str, Any]:
    """Push the folder and return what --json shows of it."""
    from rlctl.plugins.console.push import push

    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    announce(f"pushing {count(size)}B to {repo.url}")
    commit = push(repo, folder, message, card_only)
    notice(f"pushed commit {commit[:8]} to {repo.url}")
    return {"url": repo.url, "commit": commit, "created": not repo.exists}
