"""`rlctl export`: a run's model as a folder that transformers and vLLM load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli.console import print_json
from rlctl.cli.options import Json, Root, RunName, Trust
from rlctl.cli.startup import announce
from rlctl.cli.stderr import notice
from rlctl.errors import NotFoundError
from rlctl.runs.store import RunStore

if TYPE_CHECKING:
    from rlctl.runs.run import Run

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl export @last my-model

  rlctl export ppo-261121 my-model --step 40 && rlctl eval my-model

  rlctl export @last my-adapter --lora adapter   only the adapter
"""

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder to write; must be empty or not exist.")
]
Step = Annotated[
    int | None,
    typer.Option("--step", help="Export the checkpoint of this step; by default the latest."),
]
Lora = Annotated[
    Literal["merged", "adapter"],
    typer.Option("--lora", help="Merge LoRA adapters into the model, or write them alone."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a folder that `rlctl export` wrote.")]


@app.command(epilog=_EXAMPLES)
def export(
    run: RunName,
    folder: Folder,
    step: Step = None,
    lora: Lora = "merged",
    force: Force = False,
    trust: Trust = False,  # noqa: ARG001
    as_json: Json = False,
    root: Root = None,
) -> None:
    """Write a run's policy or reward model as a folder for transformers and vLLM.

    The folder holds weights, tokenizer, generation settings and a model card with the run's
    results. It appears under its name only when it is complete.
    """
    announce("reading the checkpoint")
    found = find_run(root, run, folder)
    result = write_folder(found, step, folder, lora, force)
    if as_json:
        print_json(result)


def write_folder(
    run: Run,
    step: int | None,
    folder: Path,
    lora: Literal["merged", "adapter"],
    force: bool,
    card_only: bool = False,
) -> dict[str, Any]:
    """Export the run, and return what --json shows."""
    from rlctl.runtime.export import export  # imports torch

    target = folder.expanduser()
    written = export(run, step, target, lora, force, card_only)
    notice(f"wrote {folder}: {run.name} after step {written}")
    return {"run": run.key, "step": written, "folder": str(target.absolute())}


def find_run(root: Path | None, run: str, folder: Path) -> Run:
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
