"""`rlctl new`: a recipe, a reward function and training data from a user's own records."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli import complete
from rlctl.cli.new_choices import Chosen, Options, choose
from rlctl.cli.options import Json
from rlctl.cli.questions import Questions

if TYPE_CHECKING:
    from rlctl.recipes.new_recipe import NewRecipe

app = typer.Typer(add_completion=False)

_EXAMPLES = """
Examples:

  rlctl new                                        asks, and suggests

  rlctl new mine --data problems.csv --yes         takes every suggestion

  rlctl new mine --data openai/gsm8k:main/ --prompt-key question \\
    --answer-key answer --reward number --model Qwen/Qwen2.5-0.5B-Instruct --devices 1
"""
_NUM_SHOWN = 3
_NUM_MEASURED = 1000  # prompts whose tokens are counted

Folder = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="Folder to write; by default named like the data."),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        metavar="FILE|DIR|NAME",
        help="Parquet, JSONL, JSON, CSV or Arrow file, pattern such as 'part-*.jsonl', folder of a "
        "data set, or owner/name on the hub; :SPLIT, :CONFIG/ and :CONFIG/SPLIT select a part.",
    ),
]
Val = Annotated[
    str | None,
    typer.Option(
        "--val",
        metavar="FILE|DIR|NAME",
        help="Data for validation; by default the data set's, or a part of --data.",
    ),
]
PromptKey = Annotated[
    str | None,
    typer.Option("--prompt-key", metavar="COLUMN", help="Column of texts or chats."),
]
AnswerKey = Annotated[
    str | None,
    typer.Option(
        "--answer-key",
        metavar="COLUMN",
        help="Column of right answers, of solutions, or of chats that end with one.",
    ),
]
Reward = Annotated[
    str | None,
    typer.Option(
        "--reward",
        metavar="KIND",
        help="Rewarded: exact (same text), number (the last one), math (equal expression), own "
        "(a function to change).",
        autocompletion=complete.reward_kind,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="DIR|NAME",
        help="Model folder, owner/name on the hub, or quickstart, the small one inside rlctl.",
        autocompletion=complete.bundled_model,
    ),
]
Devices = Annotated[
    int | None,
    typer.Option("--devices", min=1, metavar="N", help="GPUs, or processes on a CPU."),
]
Algorithm = Annotated[
    Literal["grpo", "ppo"],
    typer.Option("--algorithm", help="GRPO needs no critic."),
]
Instruction = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Sentence after every prompt, such as how to end the response; by default what the "
        "reward needs.",
    ),
]


@app.command(epilog=_EXAMPLES)
def new(
    folder: Folder = None,
    data: Data = None,
    val: Val = None,
    prompt_key: PromptKey = None,
    answer_key: AnswerKey = None,
    reward: Reward = None,
    model: ModelOption = None,
    devices: Devices = None,
    algorithm: Algorithm = "grpo",
    instruction: Instruction = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Accept every suggestion.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: Json = False,
) -> None:
    """Write a recipe and a reward function for your own data, and check them.

    Asks for what the options leave open, on a terminal only. Writes DIR/DIR.yaml, DIR/reward.py and
    the rows as DIR/train.parquet and DIR/val.parquet, then shows what a start would do.
    """
    from rlctl.cli.views.new import print_next, print_rows

    questions = Questions(yes)
    options = Options(
        *(folder, data, val, prompt_key, answer_key, reward, model, devices),
        instruction=instruction,
        force=force,
    )
    chosen = choose(questions, options)
    entries = _entries(chosen)
    if not as_json:
        print_rows(entries)
    questions.confirm(f"Write the recipe, the reward and the data to {chosen.folder}?")
    recipe = _write(chosen, algorithm)
    report = _dry_run(recipe, as_json)
    if as_json:
        from rlctl.cli.console import print_json

        files = {"recipe": recipe.path, "reward": recipe.reward}
        files |= {split: recipe.split(split) for split in ("train", "val")}
        print_json({"command": recipe.command, **files, "rows": entries, "dry_run": report})
    else:
        print_next(recipe)


def _entries(chosen: Chosen) -> list[dict[str, Any]]:
    """Return the first rows as the model will see them."""
    from rlctl.cli.views.data import row_entry

    rows = chosen.maker.first(_NUM_SHOWN)
    return [row_entry(index, row, chosen.tokenizer) for index, row in enumerate(rows)]


def _write(chosen: Chosen, algorithm: str) -> NewRecipe:
    """Write data, reward and recipe; nothing unless all records can be converted."""
    from rlctl.data_prep.rows import write_rows
    from rlctl.files import write_text
    from rlctl.quickstart import FOLDERS
    from rlctl.recipes.new_recipe import NewRecipe
    from rlctl.runtime.data.tokenizer import encode_prompt
    from rlctl.runtime.rewards import stubs

    splits = chosen.maker.splits()
    measured = chosen.maker.first(_NUM_MEASURED)
    longest = max(len(encode_prompt(chosen.tokenizer, row.prompt)) for row in measured)
    recipe = NewRecipe(
        verb=algorithm,
        folder=chosen.folder,
        data=chosen.source,
        model=chosen.model,
        is_small=chosen.model in FOLDERS,
        devices=chosen.devices,
        num_rows=len(splits["train"]),
        prompt_length=-(-longest * 5 // 4 // 32) * 32,  # a quarter more than was seen
    )
    for name, rows in splits.items():
        write_rows(recipe.split(name), rows)
    write_text(recipe.reward, stubs.source(chosen.reward))
    write_text(recipe.path, recipe.text())
    return recipe


def _dry_run(recipe: NewRecipe, as_json: bool) -> dict[str, Any] | None:
    """Check the recipe as a start would; print the report, or return it for JSON."""
    from rlctl.cli.startup import announce
    from rlctl.cli.views import dry_run as view
    from rlctl.recipes.compose import compose

    announce(f"wrote {recipe.path}; checking it")
    composed = compose(str(recipe.path), [])
    with view.problems_as_json(as_json):
        from rlctl.runtime.planning.dry_run import dry_run

        if as_json:
            return asdict(dry_run(composed, inline=False, strict=False))
        view.show(composed, inline=False, strict=False, as_json=False)
    return None
