"""Scores on tasks of lm-evaluation-harness for `rlctl eval --tasks`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.cli.console import print_json, print_table
from rlctl.cli.stderr import notice
from rlctl.errors import NotFoundError, UsageError
from rlctl.packages import require

if TYPE_CHECKING:
    from rlctl.plugins.console.lm_eval.harness import TaskScore
    from rlctl.recipes.schema import Config


@dataclass(frozen=True)
class TaskArguments:
    """Options of `rlctl eval` for tasks; `tasks` has names with commas, or is None.

    The names are those of tasks, groups and tags. `num_fewshot` None: as the task says.
    """

    tasks: str | None
    num_fewshot: int | None
    limit: int | None  # rows of each task
    folder: Path | None  # YAML files of tasks beside those of lm-eval
    chat_template: bool

    @property
    def names(self) -> list[str]:
        """Names of the tasks without repetitions."""
        return list(dict.fromkeys(name.strip() for name in (self.tasks or "").split(",")))

    def check(self, samples: int) -> None:
        """Raise the error of options that do not combine, or of a missing folder or package."""
        if self.tasks is None:
            given = {
                "--num-fewshot": self.num_fewshot is not None,
                "--limit": self.limit is not None,
                "--task-dir": self.folder is not None,
                "--no-chat-template": not self.chat_template,
            }
            for name in (name for name, is_given in given.items() if is_given):
                raise UsageError(f"{name} needs --tasks", hint="add --tasks NAME[,NAME…]")
            return
        if samples:
            raise UsageError(
                "--samples and --tasks cannot be combined",
                hint="without --tasks, responses to the run's data are printed",
            )
        if not all(self.names):
            raise UsageError(
                f"a name in --tasks {self.tasks!r} is empty", hint="--tasks NAME[,NAME…]"
            )
        if self.folder is not None and not self.folder.is_dir():
            raise NotFoundError(f"there is no folder {str(self.folder)!r}", where="--task-dir")
        require("lm_eval", "--tasks needs lm-eval", "lm-eval")


def print_task_scores(config: Config, given: TaskArguments, as_json: bool) -> None:
    """Evaluate the policy of `config` on tasks, and print the metrics."""
    from rlctl.plugins.console.lm_eval.harness import evaluate_tasks  # imports torch

    scores = evaluate_tasks(config, given)
    if as_json:
        asked = {"limit": given.limit, "chat_template": given.chat_template}
        print_json({**asked, "results": scores})
    else:
        columns = ["task", "metric", "value", "stderr"]
        rows = [
            (score.task, _name(score), _text(score.value), _text(score.stderr)) for score in scores
        ]
        print_table(columns, rows, right=columns[2:])
    fixed = {
        score.task
        for score in scores
        if given.num_fewshot is not None and score.num_fewshot not in (None, given.num_fewshot)
    }
    if fixed:
        notice(f"--num-fewshot has no effect on tasks that fix it: {', '.join(sorted(fixed))}")
    if given.limit is not None:
        notice(f"only the first {given.limit} rows of each task: not comparable with full results")


def _name(score: TaskScore) -> str:
    return score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
