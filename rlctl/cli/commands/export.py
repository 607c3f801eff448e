"""`rlctl export`: a run's model as a folder that transformers and vLLM load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli.console import notice, print_json
from rlctl.cli.options import Json, Root, RunName, Trust
from rlctl.cli.startup import announce
from rlctl.errors import NotFoundError
from rlctl.monitoring.text import count
from rlctl.runs.store import RunStore

if TYPE_CHECKING:
    from rlctl.runs.run import Run
    from rlctl.runtime.checkpoint.push import HubRepo

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl export @last my-model

  rlctl export ppo-261121 my-model --step 40 && rlctl eval my-model

  rlctl export @last my-adapter --lora adapter          only the adapter, in PEFT format

  rlctl export @last my-model --push my-org/my-model --private

  rlctl export @last card --card-only --push my-org/my-model          replace the README.md
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


@app.command(epilog=_EXAMPLES)
def export(
    run: RunName,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to write; must be empty or not exist.")
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", help="Export the checkpoint of this step; by default the latest."),
    ] = None,
    lora: Annotated[
        Literal["merged", "adapter"],
        typer.Option("--lora", help="Merge LoRA adapters into the model, or write them alone."),
    ] = "merged",
    force: Annotated[
        bool, typer.Option("--force", help="Replace a folder that `rlctl export` wrote.")
    ] = False,
    push: _Push = None,
    private: _Private = False,
    card_only: _CardOnly = False,
    trust: Trust = False,  # noqa: ARG001
    as_json: Json = False,
    root: Root = None,
) -> None:
    """Write a run's policy or reward model as a folder that transformers and vLLM load.

    The folder holds weights, tokenizer, generation settings and a model card with the run's
    results. It appears under its name only when it is complete. --push commits it to a model
    repository, with the token of HF_TOKEN or `hf auth login`.
    """
    if private and push is None:
        from rlctl.errors import UsageError

        raise UsageError("--private needs --push", hint="--push ORG/NAME --private")
    announce("reading the checkpoint")

    found = _find(root, run, folder)
    # The repository is checked before the export, which may take minutes.
    repo = None if push is None else _checked(push, private)
    from rlctl.runtime.checkpoint.export import export as write  # imports torch

    target = folder.expanduser()
    step = write(found, step, target, lora, force, card_only)
    notice(f"wrote {folder}: {found.name} after step {step}")
    result: dict[str, Any] = {"run": found.key, "step": step, "folder": str(target.absolute())}
    if repo is not None:
        message = f"{found.name} after step {step}"
        result |= _push(repo, target, message, card_only)
    if as_json:
        print_json(result)


def _find(root: Path | None, run: str, folder: Path) -> Run:
    """Return the run; propose to swap the arguments if the folder has the name of one."""
    store = RunStore(root)
    try:
        return store.find(run)
    except NotFoundError as error:
        names = {run.name for run in store.runs()}
        if str(folder) not in names:
            raise
        swapped = (run, str(folder)), (str(folder), run)
        raise NotFoundError(
            *(replace(problem, fix=swapped) for problem in error.problems)
        ) from error


def _checked(name: str, private: bool) -> HubRepo:
    """Return the repository to push to, after a notice if it exists."""
    from rlctl.runtime.checkpoint.push import find_repo

    repo = find_repo(name, private)
    if repo.exists:
        notice(f"{name} exists: the push adds a commit to it")
    return repo


def _push(repo: HubRepo, folder: Path, message: str, card_only: bool) -> dict[str, Any]:
    """Push the folder and return what --json shows of it."""
    from rlctl.runtime.checkpoint.push import push

    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    announce(f"pushing {count(size)}B to {repo.url}")
    commit = push(repo, folder, message, card_only)
    notice(f"pushed commit {commit[:8]} to {repo.url}")
    return {"url": repo.url, "commit": commit, "created": not repo.exists}
