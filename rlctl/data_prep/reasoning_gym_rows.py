"""Procedural tasks of reasoning-gym."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from rlctl.data_prep.datasets import dataset, option
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import MissingExtraError, UsageError
from rlctl.plugins import Params, suggestion


def require_package() -> None:
    """Import the package. Raises MissingExtraError if it is not installed."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"the package reasoning-gym is not installed: {error}", hint="pip install reasoning-gym"
        ) from error


class ReasoningGymParams(Params):
    """Options of `rlctl prep reasoning_gym`."""

    task: str = option(
        ...,
        "NAME",
        "Data set of reasoning-gym, such as leg_counting.",
        json_schema_extra={"argument": True},
    )
    train: int = option(1024, "N", "Training problems.", ge=1)
    val: int = option(128, "M", "Validation problems, with the next seed.", ge=1)
    arguments: str = option("{}", "JSON", "Its other settings.")
    system: str = option("", "NAME", "System prompt, or the name of one of the package's.")
    seed: int = Field(default=0, description="Another seed makes other problems.")


@dataset(ReasoningGymParams, "rlctl prep reasoning_gym leg_counting --out data/legs")
def reasoning_gym(params: ReasoningGymParams) -> dict[str, list[PromptRow]]:
    """Problems of reasoning-gym, which its scorer rates: train.parquet, val.parquet."""
    require_package()
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if params.task not in DATASETS:
        raise UsageError(
            f"reasoning-gym has no data set {params.task!r}",
            hint=suggestion(params.task, list(DATASETS)),
        )
    _check_scorer(params.task, reasoning_gym)
    system = SYSTEM_PROMPTS.get(params.system, params.system)
    before: list[dict[str, str]] = []
    if system:
        before = [{"role": "system", "content": system}]
    try:
        arguments = dict(json.loads(params.arguments))
        problems = {
            split: list(
                reasoning_gym.create_dataset(
                    params.task, **{**arguments, "size": size, "seed": params.seed + number}
                )
            )
            for number, (split, size) in enumerate((("train", params.train), ("val", params.val)))
        }
    except (TypeError, ValueError, AssertionError) as error:  # the package checks by `assert`
        raise UsageError(
            f"{params.task} rejects the arguments {params.arguments}: {error}",
            hint="--arguments takes a JSON object with settings of the data set",
        ) from error
    return {
        split: [
            PromptRow(
                data_source=f"reasoning_gym/{params.task}",
                prompt=[*before, {"role": "user", "content": entry["question"]}],
                ground_truth=str(entry["answer"]),
                ability="reasoning",
                extra_info={
                    "split": split,
                    "index": index,
                    "entry": json.dumps(entry, default=str),
                },
            )
            for index, entry in enumerate(entries)
        ]
        for split, entries in problems.items()
    }


def _check_scorer(task: str, package: Any) -> None:
    """Raise UsageError if the scorer needs more of a problem than JSON keeps, such as tuples."""
    entry = package.create_dataset(task, size=1, seed=0)[0]
    rate = package.get_score_answer_fn(task)
    stored = json.loads(json.dumps(entry, default=str))
    if entry["answer"] is not None and rate(entry["answer"], entry) != rate(
        entry["answer"], stored
    ):
        raise UsageError(f"the scorer of {task} does not work with problems from a file")
