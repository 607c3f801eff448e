"""`rlctl export`: a run's policy as a folder that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.cli.options import Root, RunName

app = typer.Typer(add_completion=False)

_EXAMPLES = """
Examples:

  rlctl export @last my-model

  rlctl export ppo-261121 my-model --step 40 && rlctl eval my-model

  rlctl export @last my-adapter --lora adapter          the adapter alone, in peft's form
"""


@app.command(epilog=_EXAMPLES)
def export(
    run: RunName,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to; it must not be there, or be empty.")
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", help="The checkpoint of this step; by default the newest."),
    ] = None,
    lora: Annotated[
        Literal["merged", "adapter"],
        typer.Option("--lora", help="Adapters: merged into the model, or alone."),
    ] = "merged",
    force: Annotated[bool, typer.Option("--force", help="Replace the folder.")] = False,
    root: Root = None,
) -> None:
    """Write a run's policy as a folder that transformers and vLLM load.

    Weights, tokenizer, generation settings and a model card with the run's figures; written aside, and renamed when it is whole.
    """
    from rlctl.cli.console import notice
    from rlctl.runs.store import RunStore

    found = RunStore.at(root).find(run)
    from rlctl.runtime.checkpoint.export import export as write

    step = write(found, step, folder.expanduser(), lora, force)
    notice(f"{folder}: {found.name} after step {step}")
