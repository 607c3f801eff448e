"""`rlctl reward`: test of a reward function or model on stored responses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.options import Json

if TYPE_CHECKING:
    from rlctl.data_prep.rows import PromptRow
    from rlctl.recipes.schema import Config
    from rlctl.runtime.rewards.pool import RewardPool
    from rlctl.runtime.rewards.report import RewardReport

app = typer.Typer(no_args_is_help=True)

_EXAMPLES = """
Examples:

  rlctl reward test --data test.parquet --responses responses.jsonl \\
    --reward mine.py:compute_score reward.timeout_s=5

  rlctl reward test --data test.parquet --responses responses.jsonl --model my-rm

  rlctl reward test --data pairs.parquet --model my-rm      both responses of each pair
"""


Data = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Prompts and their ground truth: parquet, or JSONL with the same columns.",
    ),
]
Responses = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Responses in the order of the rows: JSON or JSONL (texts or {response}), "
        "parquet (column response), or text lines. A reward model scores the rows' preference "
        "pairs without it.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides of the recipe, such as reward.params.gsm8k.method=flexible.",
    ),
]
Function = Annotated[
    str | None,
    typer.Option(
        "--reward",
        metavar="SPEC",
        help="Reward instead of the recipe's: name, module:function or path.py:function.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="RUN|DIR|NAME",
        help="Score with this reward model alone: a run of `rlctl train rm` (name or folder), a "
        "model folder, or a name on the hub.",
    ),
]
RecipeOption = Annotated[
    str,
    typer.Option(
        "--recipe", "-r", metavar="NAME|PATH", help="Recipe with the section `reward` to use."
    ),
]


@app.callback()
def reward() -> None:
    """Test a reward function or model on stored responses."""


@app.command("test", epilog=_EXAMPLES)
def try_reward(
    data: Data,
    responses: Responses = None,
    overrides: Overrides = None,
    function: Function = None,
    model: ModelOption = None,
    recipe: RecipeOption = "ppo",
    as_json: Json = False,
) -> None:
    """Score responses as training would, and print each score.

    Each row has one response, or the same number of consecutive responses. Where the recipe enables
    a reward model, or with --model, the model scores alone and prints its raw scores.
    """
    from rlctl.cli.console import notice, print_json
    from rlctl.cli.model_scores import score_pairs, score_responses
    from rlctl.cli.views.reward import print_scores
    from rlctl.data_prep.rows import read_rows

    _require_files(data, responses)
    config = _compose(recipe, function, model, overrides or [])
    prompts = read_rows(
        data, prompt_key=config.data.prompt_key, reward_fn_key=config.data.reward_fn_key
    )
    if responses is None:
        score_pairs(config, prompts, data, as_json)
        return
    texts = _texts(responses.expanduser())
    rows = _repeat_rows(prompts, len(texts), responses)
    if config.reward.reward_model.enable:
        report = score_responses(config, rows, texts)
    else:
        report = _score(config, rows, texts, len(texts) // len(prompts))
    scored = [_entry(i, row, texts[i], report) for i, row in enumerate(rows)]
    mean = sum(report.scores) / len(report.scores)
    if as_json:
        errors = {"num_errors": report.num_errors, "num_timeouts": report.num_timeouts}
        print_json({"mean": mean, **errors, "answers": scored})
        return
    print_scores(scored)
    notice(
        f"{len(scored)} responses, mean score {mean:.4g}, "
        f"{report.num_errors} errors, {report.num_timeouts} timeouts"
    )


def _require_files(*files: Path | None) -> None:
    from rlctl.errors import NotFoundError

    for file in files:
        if file is not None and not file.expanduser().is_file():
            raise NotFoundError("the file does not exist", where=str(file))


def _compose(
    recipe: str, function: str | None, model: str | None, overrides: Sequence[str]
) -> Config:
    """Compose the recipe; `function` replaces its reward functions, `model` its reward model."""
    from rlctl.cli.console import notice
    from rlctl.errors import UsageError
    from rlctl.recipes.compose import compose
    from rlctl.suggest import hydra_text

    if function and model:
        raise UsageError(
            "--reward and --model cannot be combined",
            hint="score with each in a command of its own",
        )

    replacement = (
        [
            "reward.custom_reward_function.path=null",
            f"reward.functions=[{_quoted(function)}]",
            "reward.weights=null",
            "reward.reward_model.enable=false",
        ]
        if function
        else []
    )
    if model:
        replacement = [
            "reward.reward_model.enable=true",
            hydra_text("reward.reward_model.model.path", model),
        ]
    composed = compose(recipe, [*replacement, *overrides])
    for line in composed.notices:
        notice(line)
    return composed.config


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _texts(path: Path) -> list[str]:
    """Read the responses of a file; a record is a text or has one under `response`."""
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
            message = "not a response: expected a text, or an object with a text under 'response'"
            problems.append(Problem(message, where))
    raise_capped(problems, path)
    return texts


def _repeat_rows(rows: Sequence[PromptRow], num_responses: int, file: Path) -> list[PromptRow]:
    """Repeat each row for each of its responses. Raises UsageError if the numbers do not match."""
    from rlctl.errors import UsageError

    if not num_responses or num_responses % len(rows):
        raise UsageError(
            f"{num_responses} responses for {len(rows)} rows",
            where=str(file),
            hint="give one response per row, or the same number for each row, consecutively",
        )
    return [row for row in rows for _ in range(num_responses // len(rows))]


def _score(
    config: Config, rows: list[PromptRow], texts: list[str], group_size: int
) -> RewardReport:
    """Score all responses, with progress on a terminal.

    Raises ConfigError if the first calls, at least one per process, all time out.
    """
    from rlctl.cli.console import stderr
    from rlctl.errors import ConfigError
    from rlctl.runtime.rank_info import available_cores
    from rlctl.runtime.rewards.report import join_reports

    num_processes = min(len(rows), config.reward.num_processes or available_cores())
    groups = [number // group_size for number in range(len(rows))]
    first = min(len(rows), -(-num_processes // group_size) * group_size)
    with (
        stderr().status("loading the reward functions") as status,
        _pool(config, rows, num_processes) as pool,
    ):
        status.update(f"scoring {len(rows)} responses")
        report = pool.score(rows[:first], texts[:first], groups=groups[:first])
        if report.num_timeouts >= first:
            raise ConfigError(
                f"the reward function exceeds its time limit on the first {first} "
                f"responses: {report.first_error}",
                hint="reward.timeout_s=N allows more time",
            )
        rest = pool.score(
            rows[first:],
            texts[first:],
            lambda done, total: status.update(f"scored {done} of {total} calls"),
            groups[first:],
        )
        return join_reports(report, rest)


def _pool(
    config: Config, rows: list[PromptRow], num_processes: int
) -> AbstractContextManager[RewardPool]:
    """Return the pool of the reward functions; the engine of the run's own judge needs torch."""
    from rlctl.runtime.rewards.pool import RewardPool
    from rlctl.runtime.rewards.request_limits import RequestSettings

    sources = dict.fromkeys(row.data_source for row in rows)
    if config.reward.judge.model.path is None:
        requests = RequestSettings.from_config(config.reward, None)
        return RewardPool.from_config(config.reward, sources, num_processes, requests=requests)
    from rlctl.runtime.evaluate import judged_pool

    return judged_pool(config, sources, num_processes)


def _entry(index: int, row: PromptRow, text: str, report: RewardReport) -> dict[str, Any]:
    result = report.results[index]
    return {
        "answer": index,
        "score": result.score,
        "components": result.components,
        "pred": result.pred,
        "error": result.error,
        "ground_truth": row.ground_truth,
        "response": text,
    }
