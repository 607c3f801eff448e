"""`rlctl reward`: try a reward function on stored answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rlctl.data_prep.rows import PromptRow
    from rlctl.runtime.rewards.pool import RewardReport

app = typer.Typer(no_args_is_help=True)


@app.callback()
def reward() -> None:
    """Try a reward function on stored answers."""


@app.command(
    "test",
    epilog="Example: rlctl reward test --data test.parquet --responses answers.jsonl --reward mine.py:compute_score reward.timeout_s=5",
)
def try_reward(
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The prompts and their ground truth: parquet, or JSONL of the same shape.",
        ),
    ],
    responses: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The answers in the order of the rows: JSON or JSONL (texts or {response}), parquet (column response), or text lines.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Overrides of the recipe, such as reward.params.gsm8k.method=flexible.",
        ),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            "--reward",
            metavar="SPEC",
            help="A name, module:function or path.py:function, in place of the recipe's.",
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option("--recipe", "-r", metavar="NAME|PATH", help="Whose section `reward` to use."),
    ] = "ppo",
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Score answers as training would, and print each verdict. Several answers a row stand side by side."""
    from rlctl.cli.console import notice, print_json
    from rlctl.data_prep.rows import read_rows
    from rlctl.errors import NotFoundError, UsageError
    from rlctl.recipes.compose import compose
    from rlctl.runtime.rank_info import available_cores
    from rlctl.runtime.rewards.pool import RewardPool
    from rlctl.runtime.rewards.specs import reward_specs

    for file in (data, responses):
        if not file.expanduser().is_file():
            raise NotFoundError("the file does not exist", where=str(file))
    named = (
        [
            "reward.custom_reward_function.path=null",
            f"reward.functions=[{_quoted(function)}]",
            "reward.weights=null",
        ]
        if function
        else []
    )
    composed = compose(recipe, [*named, *(overrides or [])])
    for line in composed.notices:
        notice(line)
    config = composed.config
    rows = read_rows(
        data, prompt_key=config.data.prompt_key, reward_fn_key=config.data.reward_fn_key
    )
    texts = _texts(responses.expanduser())
    if not texts or len(texts) % len(rows):
        raise UsageError(
            f"{len(texts)} answers for {len(rows)} rows",
            where=str(responses),
            hint="one answer a row, or the same number for each, side by side",
        )
    rows = [row for row in rows for _ in range(len(texts) // len(rows))]
    num_processes = min(len(rows), config.reward.num_processes or available_cores())
    with RewardPool(
        reward_specs(config.reward), timeout_s=config.reward.timeout_s, num_processes=num_processes
    ) as pool:
        report = pool.score(rows, texts)
    verdicts = [
        _verdict(index, row, text, report)
        for index, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]
    mean = sum(report.scores) / len(report.scores)
    if as_json:
        print_json(
            {
                "mean": mean,
                "num_errors": report.num_errors,
                "num_timeouts": report.num_timeouts,
                "answers": verdicts,
            }
        )
        return
    _print(verdicts)
    notice(
        f"{len(verdicts)} answers, mean score {mean:.4g}, {report.num_errors} errors, {report.num_timeouts} timeouts"
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _texts(path: Path) -> list[str]:
    """The answers of a file; a record is a text or holds one under `response`."""
    from rlctl.data_prep.records import raise_capped, read_records
    from rlctl.errors import Problem

    if path.suffix not in (".jsonl", ".json", ".parquet"):
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    texts: list[str] = []
    problems: list[Problem] = []
    for where, record in read_records(path):
        text = record.get("response") if isinstance(record, dict) else record
        if isinstance(text, str):
            texts.append(text)
        else:
            problems.append(
                Problem(
                    "not an answer: wanted a text, or an object with a text under 'response'", where
                )
            )
    raise_capped(problems, path)
    return texts


def _verdict(index: int, row: PromptRow, text: str, report: RewardReport) -> dict[str, Any]:
    result = report.results[index]
    return {
        "answer": index,
        "score": result.score,
        "components": result.components,
        "error": result.error,
        "ground_truth": row.ground_truth,
        "response": text,
    }


def _print(verdicts: list[dict[str, Any]]) -> None:
    from rlctl.cli.console import stdout, table

    def end(text: str) -> str:
        line = " ".join(text.split())
        return line if len(line) <= 48 else "…" + line[-47:]

    def remark(verdict: dict[str, Any]) -> str:
        return verdict["error"] or ", ".join(
            f"{name} {value:g}" for name, value in verdict["components"].items()
        )

    rows = [
        (
            str(each["answer"]),
            f"{each['score']:g}",
            str(each["ground_truth"]),
            end(each["response"]),
            remark(each),
        )
        for each in verdicts
    ]
    stdout().print(
        table(
            ["answer", "score", "ground truth", "response ends", "remark"],
            rows,
            right=["answer", "score"],
        )
    )
