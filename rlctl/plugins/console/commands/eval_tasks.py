"""`rlctl eval --tasks`: tasks of lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
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
from rlctl.cli.options import Json, Root, Trust
from rlctl.cli.startup import announce
from rlctl.plugins.console.lm_eval.task_scores import TaskArguments, print_task_scores

app = typer.Typer()

_BENCHMARKS = "Tasks of lm-evaluation-harness"
Tasks = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="NAME[,NAME…]",
        help="Evaluate on these tasks instead of the run's data (rlctl\\[lm-eval]).",
        rich_help_panel=_BENCHMARKS,
    ),
]
Fewshot = Annotated[
    int | None,
    typer.Option(
        "--num-fewshot",
        min=0,
        help="Number of solved problems in each prompt; by default the task's.",
        rich_help_panel=_BENCHMARKS,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        min=1,
        help="Use only the first rows of each task, for a trial.",
        rich_help_panel=_BENCHMARKS,
    ),
]
TaskDir = Annotated[
    Path | None,
    typer.Option(
        "--task-dir",
        metavar="DIR",
        help="Folder with your tasks, one YAML file each.",
        rich_help_panel=_BENCHMARKS,
    ),
]
ChatTemplate = Annotated[
    bool,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Render prompts with the model's chat template, or give it plain text.",
        rich_help_panel=_BENCHMARKS,
    ),
]

_EXAMPLES = """
  rlctl eval @last --tasks gsm8k,arc_easy --limit 100
"""


@app.command(epilog=_EXAMPLES, help="With --tasks, lm-evaluation-harness evaluates.")
def eval_tasks(
    target: Target,
    settings: Settings = None,
    overrides: Overrides = None,
    recipe: RecipeOption = "ppo",
    step: Step = None,
    samples: Samples = 0,
    tasks: Tasks = None,
    num_fewshot: Fewshot = None,
    limit: Limit = None,
    task_dir: TaskDir = None,
    chat_template: ChatTemplate = True,
    trust: Trust = False,
    as_json: Json = False,
    root: Root = None,
) -> bool:
    """Evaluate on tasks; return False without them."""
    given = TaskArguments(tasks, num_fewshot, limit, task_dir, chat_template)
    given.check(samples)
    if tasks is None:
        return False
    check_target(target, recipe, root)
    announce("loading the model")
    from rlctl.runtime.planning.evaluation import target_config

    words = [*(overrides or []), *(settings or [])]
    print_task_scores(target_config(target, words, recipe, step, root), given, as_json)
    return True
