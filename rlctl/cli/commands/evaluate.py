"""`rlctl eval` and `rlctl generate`: validation scores and responses of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli import complete
from rlctl.cli.console import print_json, print_table, stdout
from rlctl.cli.options import Json, Root, Trust, overrides_argument, recipe_option, set_option
from rlctl.cli.startup import announce
from rlctl.terminal import visible

app = typer.Typer()

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|DIR",
        help="Run (name, prefix, @last), model folder, or `quickstart`.",
        autocompletion=complete.run_or_quickstart,
    ),
]
Overrides = Annotated[
    list[str] | None,
    set_option("Override a setting; repeat for several."),
]
Settings = Annotated[
    list[str] | None,
    overrides_argument("Overrides, as those of --set."),
]
RecipeOption = Annotated[
    str,
    recipe_option("For a model folder: recipe with the settings of validation and generation."),
]
Step = Annotated[
    int | None,
    typer.Option("--step", help="Use the run's checkpoint of this step; by default the latest."),
]
Samples = Annotated[
    int, typer.Option("--samples", help="Number of responses to print, lowest scores first.")
]

_EVAL_EXAMPLES = """
Examples:

  rlctl eval @last

  rlctl eval quickstart

  rlctl eval path/to/model data.val_files=test.parquet \\
    actor_rollout_ref.rollout.val_kwargs.n=4 \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \\
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
"""
_GENERATE_EXAMPLES = """
Examples:

  rlctl generate quickstart "Tom has 12 apples. He buys 5 more. How many?"

  rlctl generate @last "…" -n 4 --temperature 1

  rlctl generate @last "What is it?" --image photo.jpg
"""


def check_target(target: str, recipe: str, root: Path | None) -> None:
    """Raise NotFoundError for an unknown run, model or recipe, before torch is imported."""
    from rlctl.recipes.search_path import find_recipe
    from rlctl.runs.store import find_run_or_model

    if isinstance(find_run_or_model(target, root), str):
        find_recipe(recipe)


@app.command("eval", epilog=_EVAL_EXAMPLES)
def evaluate(
    target: Target,
    settings: Settings = None,
    overrides: Overrides = None,
    recipe: RecipeOption = "ppo",
    step: Step = None,
    samples: Samples = 0,
    trust: Trust = False,  # noqa: ARG001
    as_json: Json = False,
    root: Root = None,
) -> None:
    """Generate and score responses to validation prompts of a run or a model folder.

    A run uses its own configuration and data.
    """
    overrides = [*(overrides or []), *(settings or [])]
    check_target(target, recipe, root)
    announce("loading the model")
    from rlctl import api
    from rlctl.cli.views.samples import print_sample

    validation = api.evaluate(target, overrides, recipe=recipe, step=step, root=root)
    if as_json:
        print_json(validation.metrics)
        return
    print_table(
        ["metric", "value"],
        [(name, f"{value:.4g}") for name, value in validation.metrics.items()],
        right=["value"],
    )
    if samples:
        stdout().print()
    for sample in sorted(validation.samples, key=lambda response: response.score)[:samples]:
        print_sample(sample)


@app.command("generate", epilog=_GENERATE_EXAMPLES)
def generate(
    target: Target,
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="User messages; each starts a chat.")
    ],
    num_responses: Annotated[
        int, typer.Option("-n", min=1, help="Number of responses per prompt.")
    ] = 1,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of a response; by default the recipe's."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    images: Annotated[
        list[str] | None,
        typer.Option(
            "--image",
            metavar="FILE",
            help="Image that each prompt refers to by <image>, or has at its start; repeat for "
            "several.",
        ),
    ] = None,
    overrides: Overrides = None,
    recipe: RecipeOption = "ppo",
    step: Step = None,
    trust: Trust = False,  # noqa: ARG001
    as_json: Json = False,
    root: Root = None,
) -> None:
    """Generate responses to prompts with the model's chat template."""
    check_target(target, recipe, root)
    announce("loading the model")

    from rlctl import api

    responses = api.generate(
        target,
        prompts,
        overrides or [],
        n=num_responses,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        images=images or [],
        recipe=recipe,
        step=step,
        root=root,
    )
    if as_json:
        print_json(responses)
        return
    for response in responses:
        stdout().print(visible(response.text))
