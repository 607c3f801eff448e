from __future__ import annotations

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.recipes.compose import compose
from rlctl.runtime.data.loader import PromptLoader, PromptSet, _truncate
from rlctl.runtime.data.samplers import random_order, sequential_order
from tests.rows import rows_of


def prompts(count: int) -> PromptSet:
    rows = [PromptRow("x", [{"role": "user", "content": str(i)}], str(i)) for i in range(count)]
    return PromptSet(rows_of(rows), lambda row: [int(row.ground_truth), int(row.ground_truth) + 1])


def asked(loader: PromptLoader, step: int) -> list[str]:
    return [row.ground_truth for row in loader.batch_at(step).rows]


def test_epochs_contain_every_prompt_in_different_orders() -> None:
    loader = PromptLoader(prompts(10), 3, random_order, seed=4)
    assert loader.steps_per_epoch == 3
    first = [truth for step in (1, 2, 3) for truth in asked(loader, step)]
    second = [truth for step in (4, 5, 6) for truth in asked(loader, step)]
    assert len(set(first)) == len(set(second)) == 9
    assert first != second
    assert [loader.epoch_of(rank_info) for rank_info in (0, 8, 9)] == [0, 0, 1]


def test_batch_depends_on_seed_and_step() -> None:
    one, other = (PromptLoader(prompts(10), 3, random_order, seed=seed) for seed in (4, 5))
    again = PromptLoader(prompts(10), 3, random_order, seed=4)
    assert asked(again, 5) == asked(one, 5)
    assert [asked(other, step) for step in (1, 2, 3)] != [asked(one, step) for step in (1, 2, 3)]
    assert asked(PromptLoader(prompts(10), 3, sequential_order, seed=4), 2) == ["3", "4", "5"]


def test_batch_fields_have_the_same_order() -> None:
    batch = PromptLoader(prompts(10), 3, random_order, seed=4).batch_at(2)
    assert [ids.tolist() for ids in batch.prompt_ids.rows()] == [
        [int(r.ground_truth), int(r.ground_truth) + 1] for r in batch.rows
    ]
    assert batch.group.tolist() == [0, 1, 2]
    assert batch.prompt_ids.values.dtype == torch.int64


@pytest.mark.parametrize(
    ("side", "left"), [("left", [6, 7, 8, 9]), ("right", [0, 1, 2, 3]), ("middle", [0, 1, 8, 9])]
)
def test_truncation(side: str, left: list[int]) -> None:
    overrides = [
        "data.max_prompt_length=4",
        f"data.truncation={side}",
        "data.train_files=x",
        "actor_rollout_ref.model.path=y",
    ]
    assert (
        _truncate(list(range(10)), compose("ppo_trainer", overrides).config.data, "file: row 0")
        == left
    )
