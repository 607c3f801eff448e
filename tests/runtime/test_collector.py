"""Dynamic sampling: what a step learns from, and what it leaves for the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.batch import Prompts, Ragged, Rollouts, Scored
from rlctl.runtime.data.loader import PromptLoader, PromptSet
from rlctl.runtime.data.samplers import sequential_order
from rlctl.runtime.training.collector import Collector, differing

SIZE, N = 4, 2


@dataclass
class Stand:
    """An algorithm whose answers to prompt i score the same unless i is in `mixed`; it notes what it was asked, and by which groups."""

    mixed: set[int]
    needs: Needs = Needs.GROUPS
    asked: list[list[int]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)

    def collect(self, prompts: Prompts, roles: Any, step: int) -> Scored:
        numbers = [int(row.ground_truth) for row in prompts.rows]
        self.asked.append(numbers)
        self.groups.append(prompts.group.tolist())
        rows = prompts.repeat(N)
        one = Ragged.from_rows([[1]] * len(rows), torch.int64)
        ones = one.like(torch.ones(len(rows)))
        rollouts = rows.grow(
            Rollouts,
            response_ids=one,
            response_mask=ones,
            rollout_log_probs=ones,
            finish=["stop"] * len(rows),
        )
        scores = torch.tensor(
            [float(i in self.mixed and part == 1) for i in numbers for part in range(N)]
        )
        components = {"late": scores} if len(self.asked) > 1 else {}
        return rollouts.grow(Scored, scores=scores, components=components, failed=scores > 2)


def collector(
    mixed: set[int], *settings: str, num_prompts: int = 40, **more: Any
) -> tuple[Collector, Stand]:
    rows = [
        PromptRow("x", [{"role": "user", "content": str(i)}], str(i)) for i in range(num_prompts)
    ]
    loader = PromptLoader(
        PromptSet(rows, [[i] for i in range(num_prompts)], 0), SIZE, sequential_order, seed=1
    )
    overrides = [
        "data.train_files=x",
        "actor_rollout_ref.model.path=y",
        "algorithm.filter_groups.enable=true",
        *settings,
    ]
    stand = Stand(mixed, **more)
    return Collector.of(
        loader, cast(Any, stand), compose("grpo_trainer", overrides).config.algorithm
    ), stand


def learnt_from(scored: Scored) -> list[str]:
    return [row.ground_truth for row in scored.rows]


def test_groups_that_differ_are_gathered_and_the_surplus_comes_first_in_the_next_step() -> None:
    sampling, stand = collector({1, 2, 5, 6, 7, 8, 11})
    scored, metrics = sampling.collect(cast(Any, None), 1)
    assert stand.asked == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stand.groups == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]  # other random streams than the first batch's
    assert learnt_from(scored) == [number for number in "1256" for _ in range(N)]
    assert scored.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert scored.scores.tolist() == [0.0, 1.0] * 4
    assert scored.components["late"].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert metrics == {
        "filter_groups/num_gen_batches": 2,
        "filter_groups/evicted_groups": 3,
        "filter_groups/surplus_groups": 1,
        "filter_groups/score_mean": 5 / 16,
    }
    scored, metrics = sampling.collect(cast(Any, None), 2)
    assert stand.asked[2] == [7, 8, 9, 10]
    assert stand.asked[-1] == [39, 0, 1, 2]  # the stream goes on with the next epoch
    assert learnt_from(scored)[::N] == ["7", "8", "11", "1"]
    assert sampling.state_dict() == {"epoch": 1, "position": 43, "waiting": [42]}


def test_it_goes_on_from_its_state() -> None:
    mixed = {1, 2, 5, 6, 7, 8, 11, 13, 14, 15}
    straight, _ = collector(mixed)
    straight.collect(cast(Any, None), 1)
    again, _ = collector(mixed)
    again.load_state_dict(straight.state_dict(), 1)
    for step in (2, 3):
        assert learnt_from(again.collect(cast(Any, None), step)[0]) == learnt_from(
            straight.collect(cast(Any, None), step)[0]
        )
    assert again.state_dict() == straight.state_dict()
    old, stand = collector(mixed)
    old.load_state_dict(
        {}, 2
    )  # a checkpoint without a filter: two batches of prompts have been used
    old.collect(cast(Any, None), 3)
    assert stand.asked[0] == [8, 9, 10, 11]


def test_too_few_groups_that_differ_end_the_run() -> None:
    sampling, stand = collector({1, 5}, "algorithm.filter_groups.max_num_gen_batches=3")
    with pytest.raises(
        RlctlError,
        match="step 1: after 3 batches of 4 prompts only 2 have answers that differ in score",
    ):
        sampling.collect(cast(Any, None), 1)
    assert len(stand.asked) == 3


def test_a_component_that_the_reward_does_not_give_is_named() -> None:
    sampling, _ = collector({1}, "algorithm.filter_groups.metric=acc")
    with pytest.raises(
        ConfigError, match=r"filter_groups\.metric=acc: the reward gives no such component"
    ):
        sampling.collect(cast(Any, None), 1)


def test_an_algorithm_that_answers_nothing_is_not_filtered() -> None:
    sampling, stand = collector(set(), needs=Needs.NOTHING)
    scored, metrics = sampling.collect(cast(Any, None), 2)
    assert stand.asked == [[4, 5, 6, 7]]
    assert len(scored) == SIZE * N
    assert metrics == {}
    assert sampling.epoch() == 0


def test_differing() -> None:
    values = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5])
    assert differing(values, torch.tensor([0, 0, 1, 1, 2])).tolist() == [
        False,
        False,
        True,
        True,
        False,
    ]
