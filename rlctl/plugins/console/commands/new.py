"""`rlctl new`: a recipe, a reward function and training data from a user's records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli import complete
from rlctl.cli.console import print_json, stdout, table
from rlctl.cli.options import Json
from rlctl.cli.startup import announce, problems_as_json
from rlctl.cli.stderr import print_problems, stderr
from rlctl.errors import RlctlError
from rlctl.terminal import visible

if TYPE_CHECKING:
    from rlctl.data_prep.raw_data import RawData
    from rlctl.plugins.console.project.project_files import Project
    from rlctl.plugins.console.project.questions import Answers
    from rlctl.runtime.planning.dry_run import DryRun

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl new                                        asks, and suggests

  rlctl new mine --data problems.csv --yes         takes every suggestion

  rlctl new mine --data openai/gsm8k:main/ --prompt-key question \\
    --answer-key answer --reward number --model Qwen/Qwen3-0.6B --devices 1
"""
_NUM_SHOWN = 3
_EXAMPLE = 60  # characters of a value


def _complete_reward(incomplete: str) -> list[str]:
    """Complete the kinds of reward."""
    from rlctl.plugins.console.project.rewards import REWARDS

    return [kind for kind in REWARDS if kind.startswith(incomplete)]


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
        autocompletion=_complete_reward,
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


Encoding = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Encoding of text files, such as cp1252; by default found in each."
    ),
]
Delimiter = Annotated[
    str | None,
    typer.Option(
        metavar="CHAR", help="Separator of CSV fields, or `tab`; by default found in each file."
    ),
]


Try = Annotated[
    bool,
    typer.Option(
        "--try/--no-try",
        help="Score responses of the model to ten rows, for a minute at most, or do not.",
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
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Accept every suggestion.")] = False,
    try_model: Try = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: Json = False,
) -> None:
    """Write a recipe and a reward function for your own data, and check them.

    Asks for what the options leave open, on a terminal only. Writes DIR/DIR.yaml, DIR/reward.py and
    the rows as DIR/train.parquet and DIR/val.parquet, then shows what a start would do.
    """
    from rlctl.cli.views.samples import print_row, row_entry
    from rlctl.data_prep.raw_data import find_raw
    from rlctl.data_prep.text_files import text_form
    from rlctl.plugins.console.project.project_files import Project

    if folder is not None and not force:
        Project(folder, algorithm).refuse_existing()
    options = {
        "data": data,
        "prompt_key": prompt_key,
        "answer_key": answer_key,
        "reward": reward,
        "model": model,
        "devices": devices and str(devices),
    }
    can_ask = sys.stdin.isatty() and sys.stderr.isatty()
    form = text_form(encoding, delimiter)
    answers = _answer(options, lambda text: find_raw(text, val, form), yes, can_ask)
    project = Project(folder or Path(answers.rows.data.name), algorithm)
    if not force:
        project.refuse_existing()
    rows = answers.rows_with(instruction)
    splits = rows.splits()
    entries = [
        row_entry(index, row, answers.tokenizer) for index, row in enumerate(rows.first(_NUM_SHOWN))
    ]
    if not as_json:
        for entry in entries:
            print_row(entry)
    question = f"Write the recipe, the reward and the data to {project.folder}?"
    if can_ask and not yes and not typer.confirm(question, True, err=True):
        raise typer.Exit(1)
    project.write(answers, rows, splits)
    _report(project, entries if as_json else None, try_model)


def _report(project: Project, entries: Sequence[Mapping[str, Any]] | None, try_model: bool) -> None:
    """Check the project and print what a start does and how to start; as JSON with `entries`."""
    from rlctl.plugins.console.project.model_trial import run_trial

    report = _dry_run(project, entries is not None)
    trial = run_trial(project.files["recipe"]) if try_model else None
    if entries is not None:
        made = {"command": project.command, **project.files, "rows": entries}
        print_json({**made, "dry_run": report, "trial": trial})
        return
    files = project.files
    stdout().print(f"\nchange     {files['recipe']}, {files['reward']}")
    stdout().print(f"start      {project.command}")


def _answer(
    options: Mapping[str, str | None],
    find: Callable[[str], RawData],
    accept: bool,
    can_ask: bool,
) -> Answers:
    """Return the answers to all questions; show the columns before questions about them."""
    from rlctl.data_prep.raw_data import kind_of
    from rlctl.plugins.console.project.questions import Interview

    interview = Interview(options, accept, _ask if can_ask else None, announce)
    raw = interview.find_data(find)
    if raw is not None and can_ask and None in (options["prompt_key"], options["answer_key"]):
        rows = [
            (str(number), visible(name), kind_of(value), visible(f"{value!s:.{_EXAMPLE}}"))
            for number, (name, value) in enumerate(raw.columns().items(), 1)
        ]
        stderr().print(table(["", "column", "kind", "value"], rows, right=[""]))
    return interview.finish(raw)


def _ask(question: str, suggestion: str | None, parse: Callable[[str], Any]) -> Any:
    """Ask until `parse` takes what is typed."""
    while True:
        try:
            return parse(typer.prompt(question, default=suggestion, err=True).strip())
        except RlctlError as error:
            print_problems(error.problems)


def _dry_run(project: Project, as_json: bool) -> DryRun | None:
    """Check the recipe as a start would; print the report, or return it for JSON."""
    from rlctl.cli.views import dry_run_report as view
    from rlctl.recipes.compose import compose

    announce(f"wrote {project.files['recipe']}; checking it")
    composed = compose(str(project.files["recipe"]), [])
    with problems_as_json(as_json):
        from rlctl.runtime.planning.dry_run import dry_run

        if as_json:
            return dry_run(composed, inline=False, strict=False)
        start = f"`{project.command}`"
        view.show(composed, inline=False, strict=False, as_json=False, start=start)
    return None
