"""`rlctl reward`: test of a reward function or model on stored responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.options import Json, Trust, overrides_argument, recipe_option
from rlctl.cli.startup import compose_with_notices
from rlctl.errors import NotFoundError, UsageError
from rlctl.suggest import hydra_text

if TYPE_CHECKING:
    from rlctl.recipes.schema import Config

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl reward test --data test.parquet --responses responses.jsonl \\
    --reward mine.py:compute_score reward.timeout_s=5

  rlctl reward test --data test.parquet --responses made.jsonl --model my-rm

  rlctl reward test --data pairs.parquet --model my-rm    responses of pairs
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
    overrides_argument("Overrides of the recipe, such as reward.params.gsm8k.method=flexible."),
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
    str, recipe_option("Recipe with the section `reward` to use.", "NAME|PATH")
]


@app.command("test", epilog=_EXAMPLES)
def try_reward(
    data: Data,
    responses: Responses = None,
    overrides: Overrides = None,
    function: Function = None,
    model: ModelOption = None,
    recipe: RecipeOption = "ppo",
    trust: Trust = False,  # noqa: ARG001
    as_json: Json = False,
) -> None:
    """Score responses as training would, and print each score.

    Each row has one response, or the same number of consecutive responses. Where the recipe enables
    a reward model, or with --model, the model scores alone and prints its raw scores.
    """
    from rlctl.cli.reward_scores import (
        print_function_scores,
        print_model_scores,
        print_pair_scores,
        read_texts,
        responses_per_row,
    )
    from rlctl.data_prep.rows import read_rows

    _require_files(data, responses)
    config = _compose(recipe, function, model, overrides or [])
    responses = responses and responses.expanduser()
    if responses is not None and not config.reward.reward_model.enable:
        print_function_scores(config, data, responses, as_json)
        return
    keys = ("prompt_key", "reward_fn_key", "image_key")
    prompts = read_rows(data, **{key: getattr(config.data, key) for key in keys})
    if responses is None:
        print_pair_scores(config, prompts, data, as_json)
        return
    texts = list(read_texts(responses))
    size = responses_per_row(len(prompts), len(texts), responses)
    print_model_scores(config, [row for row in prompts for _ in range(size)], texts, as_json)


def _require_files(*files: Path | None) -> None:
    for file in files:
        if file is not None and not file.expanduser().is_file():
            raise NotFoundError("the file does not exist", where=str(file))


def _compose(
    recipe: str, function: str | None, model: str | None, overrides: Sequence[str]
) -> Config:
    """Compose the recipe; `function` replaces its reward functions, `model` its reward model."""
    if function and model:
        raise UsageError(
            "--reward and --model cannot be combined",
            hint="score with each in a separate command",
        )

    folder = Path(recipe).parent
    if (folder / "run.json").is_file():  # the configuration of a run, which may be another's
        from rlctl.runs.trust import check

        given = list(overrides)
        if function:
            given += ["reward.functions=", "reward.custom_reward_function.path="]
        check(folder, given, section="reward.")
    replacement: list[str] = []
    if function:
        replacement = [
            "reward.custom_reward_function.path=null",
            f"reward.functions=[{_quoted(function)}]",
            "reward.weights=null",
            "reward.reward_model.enable=false",
        ]
    elif model:
        replacement = [
            "reward.reward_model.enable=true",
            hydra_text("reward.reward_model.model.path", model),
        ]
    return compose_with_notices(recipe, [*replacement, *overrides]).config


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
