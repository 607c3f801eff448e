"""`rlctl export`: a run's model as a folder that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.cli.options import Root, RunName
from rlctl.cli.startup import announce

app = typer.Typer(add_completion=False)

_EXAMPLES = """
Examples:

  rlctl export @last my-model

  rlctl export ppo-261121 my-model --step 40 && rlctl eval my-model

  rlctl export @last my-adapter --lora adapter          only the adapter, in PEFT format
"""


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
    root: Root = None,
) -> None:
    """Write a run's policy or reward model as a folder that transformers and vLLM load.

    The folder holds weights, tokenizer, generation settings and a model card with the run's
    results. It appears under its name only when it is complete.
    """
    announce("reading the checkpoint")
    from rlctl.cli.console import notice
    from rlctl.runs.store import RunStore

    found = RunStore.at(root).find(run)
    from rlctl.runtime.checkpoint.export import export as write  # imports torch

    step = write(found, step, folder.expanduser(), lora, force)
    notice(f"wrote {folder}: {found.name} after step {step}")
