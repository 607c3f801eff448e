"""Advantages of a batch that is divided between workers are those of the whole batch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlctl import plugins
from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    Estimator,
    load_estimator,
)
from rlctl.runtime.workers.dispatch import split_groups
from tests.runtime.test_dispatch import prompts

SIZES = [3, 2, 4, 3]  # rows of each group


def inputs() -> AdvantageInputs:
    draw = torch.Generator().manual_seed(1)
    group = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    shape = len(group), 6
    lengths = torch.randint(2, 7, (len(group),), generator=draw)
    mask = (torch.arange(shape[1]) < lengths[:, None]).float()
    rewards = torch.zeros(shape)
    rewards[torch.arange(shape[0]), lengths - 1] = torch.rand(shape[0], generator=draw)
    return AdvantageInputs(
        rewards=rewards,
        mask=mask,
        group=group,
        values=torch.rand(shape, generator=draw) * mask,
        greedy_scores=torch.rand(shape[0], generator=draw),
        components={"a": torch.rand(shape[0], generator=draw)},
        log_probs=-torch.rand(shape, generator=draw) * mask,
        sum_pi_squared=torch.rand(shape, generator=draw) * mask,
    )


class Workers:
    """Threads that sum numbers over all of them."""

    def __init__(self, num_workers: int) -> None:
        self.numbers: list[torch.Tensor] = []
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(num_workers)

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.numbers.append(numbers)
        self.barrier.wait(60)
        found = torch.stack(self.numbers).sum(0)
        if self.barrier.wait(60) == 0:
            self.numbers.clear()
        self.barrier.wait(60)
        return found


def divided(estimator: Estimator, whole: AdvantageInputs, num_workers: int) -> list[torch.Tensor]:
    batch = replace(prompts(len(whole.group)), group=whole.group)
    workers, config = Workers(num_workers), AdvantageConfig(0.99, 0.9, True)

    def compute(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fields: dict[str, Any] = {
            name: value[rows] if isinstance(value, torch.Tensor) else value
            for name, value in vars(whole).items()
        }
        fields["components"] = {name: each[rows] for name, each in whole.components.items()}
        return estimator(AdvantageInputs(**fields | {"total": workers.total}), config)

    with ThreadPoolExecutor(num_workers) as threads:
        results = list(threads.map(compute, split_groups(batch, num_workers)))
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


ESTIMATORS = [name for name in plugins.names("advantages") if load_estimator(name, {}).by_group]


def test_most_estimators_can_be_divided() -> None:
    assert set(plugins.names("advantages")) - set(ESTIMATORS) == {"gpg"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_parts_of_a_batch_get_the_advantages_of_the_whole(name: str) -> None:
    estimator, whole = load_estimator(name, {}), inputs()
    expected = estimator(whole, AdvantageConfig(0.99, 0.9, True))
    for num_workers in (2, 6):  # some of six have no group
        for found, one in zip(divided(estimator, whole, num_workers), expected, strict=True):
            assert torch.allclose(found, one, rtol=1e-5, atol=1e-6)


def test_rows_of_a_group_go_to_one_worker() -> None:
    batch = replace(prompts(12), group=inputs().group)
    assert [part.tolist() for part in split_groups(batch, 3)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 11],
    ]
    assert [len(part) for part in split_groups(batch, 12)].count(0) == 8
    assert torch.cat(split_groups(batch, 5)).tolist() == list(range(12))
