"""`rlctl data`: rows of a data file as the model will see them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlctl import plugins
from rlctl.cli import PluginGroup
from rlctl.cli.console import print_json
from rlctl.cli.more_options import add_options
from rlctl.cli.options import Json
from rlctl.cli.stderr import notice
from rlctl.errors import NotFoundError, UsageError
from rlctl.json_values import finite
from rlctl.text import plural


class _DataGroup(PluginGroup):
    """Group `rlctl data`, of which some commands and options are plug-ins."""

    kind = "commands.data"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.added: set[str] = set()  # plug-ins with options

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, with the options of plug-ins that are named `data-COMMAND.…`."""
        command = super().get_command(ctx, cmd_name)
        for options in plugins.names("command_options"):
            prefix, _, name = options.partition(".")
            if prefix == f"data-{cmd_name}" and name not in self.added:
                self.added.add(name)
                add_options(command, plugins.load("command_options", options))
        return command


app = typer.Typer(cls=_DataGroup)

_EXAMPLE = """
Examples:

  rlctl data show data/gsm8k/train.parquet --model Qwen/Qwen3-0.6B -n 1
"""


@app.command(epilog=_EXAMPLE)
def show(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Parquet, or JSONL with the same columns.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="DIR",
            help="Render the chat template of this model, and count tokens.",
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="Number of rows.")] = 3,
    start: Annotated[int, typer.Option(min=0, help="First row to show, counted from 0.")] = 0,
    prompt_key: Annotated[
        str, typer.Option(metavar="COLUMN", help="Column of prompts.")
    ] = "prompt",
    reward_fn_key: Annotated[
        str, typer.Option(metavar="COLUMN", help="Column of data source names.")
    ] = "data_source",
    image_key: Annotated[str, typer.Option(metavar="COLUMN", help="Column of images.")] = "images",
    as_json: Json = False,
) -> None:
    """Show rows: the prompt as the model will see it, and the inputs of the reward function."""
    from rlctl.cli.views.samples import print_row, row_entry
    from rlctl.data_prep.rows import PromptRow, stream_rows

    if not file.expanduser().exists():
        raise NotFoundError(
            "the data file does not exist",
            where=str(file),
            hint="`rlctl prep arithmetic --out data` writes one",
        )
    wanted: dict[int, PromptRow] = {}
    num_rows = 0
    keys = {"prompt_key": prompt_key, "reward_fn_key": reward_fn_key, "image_key": image_key}
    for row in stream_rows(file, **keys):
        if start <= num_rows < start + count:
            wanted[num_rows] = row
        num_rows += 1
    if not wanted:
        raise UsageError(
            f"--start {start} is past the last row",
            where=str(file),
            hint=f"the file has {plural(num_rows, 'row')}, counted from 0",
        )
    tokenizer = None
    if model:
        from rlctl.runtime.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(model)
    shown = [row_entry(index, row, tokenizer) for index, row in wanted.items()]
    if as_json:
        print_json(finite(shown))
        return
    for entry, row in zip(shown, wanted.values(), strict=True):
        print_row(entry, row.images)
    more = "" if model else "; --model DIR renders them with a chat template and counts tokens"
    notice(f"{file}: {plural(num_rows, 'row')}{more}")
