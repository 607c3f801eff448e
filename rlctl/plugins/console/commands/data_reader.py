"""`rlctl data show FILE data.reader=…`: rows of a reader, and the tokens that SFT learns."""

from __future__ import annotations

from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from rlctl.cli.console import print_json, stdout
from rlctl.cli.options import Json, overrides_argument
from rlctl.cli.startup import announce, compose_with_notices
from rlctl.cli.stderr import notice
from rlctl.errors import UsageError
from rlctl.suggest import hydra_text, overridden_keys
from rlctl.terminal import visible
from rlctl.text import plural

app = typer.Typer()

_FILES, _MODEL = "data.train_files", "actor_rollout_ref.model.path"
_EXAMPLES = """

  rlctl data show chats.jsonl data.reader=chats -m MODEL   what SFT learns

  rlctl data show mine.bin data.custom_cls.path=mine.py \\
    data.custom_cls.name=Mine
"""


@app.command(
    epilog=_EXAMPLES,
    help="With settings of `rlctl train sft`, such as data.reader=chats, show the rows of a reader "
    "as the tokens that the model sees, and which of them it learns.",
)
def show(
    file: Path,
    overrides: Annotated[
        list[str] | None, overrides_argument("Settings, such as data.reader=chats.")
    ] = None,
    model: str | None = None,
    count: int = 3,
    start: int = 0,
    as_json: Json = False,
) -> bool:
    """Show rows of the reader in the settings; return False without settings."""
    if not overrides:
        return False
    announce("loading the tokenizer")
    keys = overridden_keys(overrides)
    given = {_FILES: str(file), _MODEL: model or "quickstart"}
    words = [hydra_text(key, value) for key, value in given.items() if model or key not in keys]
    config = compose_with_notices("sft_trainer", [*overrides, *words]).config
    if config.data.reader is None:
        hint = "data.reader=chats, or data.custom_cls.path and data.custom_cls.name"
        raise UsageError("settings of `rlctl data show` choose a reader", hint=hint)
    from rlctl.cli.views.samples import print_row, row_entry
    from rlctl.data_prep.rows import existing_file
    from rlctl.json_values import finite
    from rlctl.runtime.data import bundled
    from rlctl.runtime.data.readers import Source, learned_tokens, load_reader, reader_rows
    from rlctl.runtime.data.tokenizer import tokenizer_of
    from rlctl.runtime.planning.model_paths import with_models

    with bundled.readable(with_models(config)) as ready:
        tokenizer: Any = tokenizer_of(ready.actor_rollout_ref.model)
        source = Source(existing_file(file), tokenizer, ready.data, ready.data.skip_invalid)
        rows = reader_rows(load_reader(ready.data), source)
        shown = list(islice(rows, start, start + count))
    if not shown:
        raise UsageError(f"--start {start} is past the last row", where=str(file))
    entries: list[dict[str, Any]] = []
    for index, row in enumerate(shown, start):
        if row is None:
            entries.append({"row": index, "left_out": "too long"})
        elif (tokens := learned_tokens(row)) is None:
            entries.append(row_entry(index, row, tokenizer))
        else:
            pairs = groupby(zip(*tokens, strict=True), lambda pair: pair[1])
            parts = [(bool(mask), tokenizer.decode([id for id, _ in run])) for mask, run in pairs]
            parts_shown = [{"learned": learned, "text": text} for learned, text in parts]
            numbers = {"num_tokens": len(tokens[0]), "num_learned": sum(tokens[1])}
            entries.append({"row": index, **numbers, "parts": parts_shown})
    if as_json:
        print_json(finite(entries))
        return True
    for entry in entries:
        if "prompt" in entry:
            print_row(entry)
        else:
            _print(entry)
    model_name = model or config.actor_rollout_ref.model.path
    notice(f"{plural(len(entries), 'row')} of {file}, with the tokenizer of {model_name}")
    return True


def _print(entry: dict[str, Any]) -> None:
    out = stdout()
    if "left_out" in entry:
        out.print(Text(f"row {entry['row']}: left out, {entry['left_out']}", "bold"))
        return
    facts = f"{entry['num_tokens']} tokens, {entry['num_learned']} learned"
    out.print(Text.assemble((f"row {entry['row']}  ", "bold"), (facts, "dim")))
    for part in entry["parts"]:
        name, style = ("learned", "bold green") if part["learned"] else ("context", "dim")
        out.print(Text.assemble((f"{name}: ", "bold"), (visible(part["text"]), style)))
    out.print()
