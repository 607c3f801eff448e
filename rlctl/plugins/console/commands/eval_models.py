"""`rlctl eval A B` and `--intervals`: 95 % intervals, and a paired test on the same rows."""

from __future__ import annotations

from typing import Annotated

import typer

from rlctl.cli.commands.evaluate import (
    Overrides,
    RecipeOption,
    Samples,
    Settings,
    Step,
    Target,
    check_target,
)
from rlctl.cli.console import print_json, print_table
from rlctl.cli.options import Json, Root, Trust
from rlctl.cli.startup import announce
from rlctl.errors import UsageError

app = typer.Typer()

Intervals = Annotated[
    bool,
    typer.Option(
        "--intervals", help="Print mean@k, pass@k and maj@k of the prompts with 95 % intervals."
    ),
]

_EXAMPLES = """
  rlctl eval @last --intervals data.val_files=~/data/math500/test.parquet

  rlctl eval before after actor_rollout_ref.rollout.val_kwargs.n=4 \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
"""


@app.command(
    epilog=_EXAMPLES,
    help="With two runs or folders (`rlctl eval A B`), a paired test compares them on the same "
    "rows.",
)
def eval_models(
    target: Target,
    settings: Settings = None,
    overrides: Overrides = None,
    recipe: RecipeOption = "ppo",
    step: Step = None,
    samples: Samples = 0,
    intervals: Intervals = False,
    trust: Trust = False,
    as_json: Json = False,
    root: Root = None,
) -> bool:
    """Evaluate one model with intervals, or compare two; return False for one without."""
    words = settings or []
    others = [word for word in words if "=" not in word and not word.startswith(("+", "~"))]
    if not intervals and not others:
        return False
    if len(others) > 1:
        raise UsageError(f"rlctl eval compares two models, given {len(others) + 1}")
    if samples:
        raise UsageError("--samples is for one model, without --intervals")
    targets = [target, *others]
    for name in targets:
        check_target(name, recipe, root)
    announce("loading the model")
    from rlctl.plugins.console import paired_scores
    from rlctl.runtime.evaluate import evaluate
    from rlctl.runtime.planning.evaluation import target_config

    given = [*(overrides or []), *(word for word in words if word not in others)]
    configs = [target_config(name, given, recipe, step, root) for name in targets]
    answers = [evaluate(config).samples for config in configs]
    paired_scores.check_rows(targets, answers)
    found = [
        paired_scores.figures(responses, config.actor_rollout_ref.rollout.val_kwargs.n)
        for responses, config in zip(answers, configs, strict=True)
    ]
    rows = list(paired_scores.rows(targets, found))
    if as_json:
        print_json(rows)
        return True
    columns = ["model", "metric", "mean", "95 % interval", "prompts", "better : worse", "p"]
    if not others:
        columns = columns[:5]
    lines = [paired_scores.shown(row)[: len(columns)] for row in rows]
    print_table(columns, lines, right=columns[2:])
    return True
