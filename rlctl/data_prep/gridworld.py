"""Games of the environment `gridworld`: each row is a seed, from which its grid follows."""

from __future__ import annotations

from pydantic import Field

from rlctl.data_prep.agent_columns import TOOL_AGENT
from rlctl.data_prep.datasets import dataset, option
from rlctl.data_prep.rows import PromptRow
from rlctl.plugins import Params

DATA_SOURCE = "rlctl/gridworld"
INSTRUCTION = "Walk to the goal: up, down, left or right. "


class GridworldParams(Params):
    """Options of `rlctl prep gridworld`."""

    train: int = option(1024, "N", "Training games.", ge=1)
    val: int = option(128, "M", "Validation games.", ge=1)
    seed: int = Field(default=0, description="Another seed makes other games.")


@dataset(
    GridworldParams,
    "rlctl prep gridworld --out data/gridworld --train 1024 --val 128 --seed 1",
    default_out="data/gridworld",
    train=lambda _: "grpo --recipe gridworld",
)
def gridworld(params: GridworldParams) -> dict[str, list[PromptRow]]:
    """Walks for the environment gridworld, which gives the score: train.parquet, val.parquet."""
    counts = {"train": params.train, "val": params.val}
    return {
        split: [_row(split, index, f"{params.seed} {split} {index}") for index in range(count)]
        for split, count in counts.items()
    }


def _row(split: str, index: int, seed: str) -> PromptRow:
    return PromptRow(
        data_source=DATA_SOURCE,
        prompt=[{"role": "user", "content": INSTRUCTION}],
        ground_truth="",
        ability="game",
        extra_info={"split": split, "index": index, "seed": seed},
        agent_name=TOOL_AGENT,
    )
