"""Dynamic sampling: the groups that a step learns from, and its surplus for the next step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, RlctlError
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.batch import Prompts, Ragged, Scored
from rlctl.runtime.data.loader import PromptLoader, PromptSet
from rlctl.runtime.data.samplers import sequential_order
from rlctl.runtime.training.collector import Collector
from rlctl.tracking.episodes import Episode
from tests.configs import configured
from tests.generation import respond
from tests.rows import rows_of

SIZE, N = 4, 2


@dataclass
class FakeAlgorithm:
    """Algorithm whose responses to prompt i all have the same score unless i is in `mixed`.

    Records the prompts and the group numbers of each call.
    """

    mixed: set[int]
    needs: Needs = Needs.GROUPS
    prompts: list[list[int]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)

    def collect(self, prompts: Prompts, roles: Any, step: int) -> Scored:
        numbers = [int(row.ground_truth) for row in prompts.rows]
        self.prompts.append(numbers)
        self.groups.append(prompts.group.tolist())
        rows = prompts.repeat(N)
        rollouts = respond(rows, [[1]] * len(rows))
        scores = torch.tensor(
            [float(i in self.mixed and part == 1) for i in numbers for part in range(N)]
        )
        components = {"late": scores} if len(self.prompts) > 1 else {}
        return rollouts.grow(Scored, scores=scores, components=components, failed=scores > 2)


def collector(
    mixed: set[int],
    *settings: str,
    num_prompts: int = 40,
    gen_batch_size: int | None = None,
    **more: Any,
) -> tuple[Collector, FakeAlgorithm]:
    rows = [
        PromptRow("x", [{"role": "user", "content": str(i)}], str(i)) for i in range(num_prompts)
    ]
    prompts = PromptSet(rows_of(rows), lambda row: [int(row.ground_truth)])
    loader = PromptLoader(prompts, SIZE, sequential_order, seed=1)
    algorithm = FakeAlgorithm(mixed, **more)
    config = configured("grpo", ["algorithm.filter_groups.enable=true"], settings)
    plan = Collector.from_config(loader, cast(Any, algorithm), config)
    plan.gen_batch_size = gen_batch_size
    return plan, algorithm


def ground_truths(scored: Scored) -> list[str]:
    return [row.ground_truth for row in scored.rows]


def test_filter_collects_varied_groups_and_starts_the_next_step_with_the_surplus() -> None:
    sampling, algorithm = collector({1, 2, 5, 6, 7, 8, 11})
    scored, metrics = sampling.collect(cast(Any, None), 1)
    assert algorithm.prompts == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Different group numbers give the second batch different random streams.
    assert algorithm.groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ground_truths(scored) == [number for number in "1256" for _ in range(N)]
    assert scored.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert scored.scores.tolist() == [0.0, 1.0] * 4
    assert scored.components["late"][:4].isnan().all(), "the first batch has no such component"
    assert scored.components["late"][4:].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert metrics == {
        "filter_groups/num_gen_batches": 2,
        "filter_groups/evicted_groups": 3,
        "filter_groups/surplus_groups": 1,
        "filter_groups/score_mean": 5 / 16,
    }
    scored, metrics = sampling.collect(cast(Any, None), 2)
    assert algorithm.prompts[2] == [7, 8, 9, 10]
    assert algorithm.prompts[-1] == [39, 0, 1, 2]  # the prompt stream continues with the next epoch
    assert ground_truths(scored)[::N] == ["7", "8", "11", "1"]
    assert sampling.state_dict() == {"epoch": 1, "position": 43, "waiting": [42]}


def test_gen_batch_size_prompts_are_generated_at_a_time() -> None:
    sampling, algorithm = collector({1, 2, 5, 6, 7, 8, 11}, gen_batch_size=6)
    scored, metrics = sampling.collect(cast(Any, None), 1)
    assert algorithm.prompts == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert algorithm.groups == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert ground_truths(scored)[::N] == ["1", "2", "5", "6"]
    assert metrics["filter_groups/surplus_groups"] == 3
    scored, _ = sampling.collect(cast(Any, None), 2)
    assert algorithm.prompts[2] == [7, 8, 11, 12, 13, 14]
    assert ground_truths(scored)[:4:N] == ["7", "8"]


def test_collector_resumes_from_its_state() -> None:
    mixed = {1, 2, 5, 6, 7, 8, 11, 13, 14, 15}
    straight, _ = collector(mixed)
    straight.collect(cast(Any, None), 1)
    again, _ = collector(mixed)
    again.load_state_dict(straight.state_dict(), 1)
    for step in (2, 3):
        assert ground_truths(again.collect(cast(Any, None), step)[0]) == ground_truths(
            straight.collect(cast(Any, None), step)[0]
        )
    assert again.state_dict() == straight.state_dict()
    old, algorithm = collector(mixed)
    old.load_state_dict({}, 2)  # without a filter, two steps have used two batches of prompts
    old.collect(cast(Any, None), 3)
    assert algorithm.prompts[0] == [8, 9, 10, 11]


def test_too_few_varied_groups_raise_an_error() -> None:
    sampling, algorithm = collector({1, 5}, "algorithm.filter_groups.max_num_gen_batches=3")
    with pytest.raises(
        RlctlError,
        match="step 1: 3 batches of 4 prompts gave only 2 groups with different values of score",
    ):
        sampling.collect(cast(Any, None), 1)
    assert len(algorithm.prompts) == 3


def test_unknown_metric_is_rejected_by_name() -> None:
    sampling, _ = collector({1}, "algorithm.filter_groups.metric=format")
    with pytest.raises(
        ConfigError, match=r"filter_groups\.metric=format: the reward has no such component"
    ):
        sampling.collect(cast(Any, None), 1)


def played(*failed: list[bool], num_rows: int = 2) -> Scored:
    """Return groups of episodes with `num_rows` rows each; True is an episode that failed."""
    episodes = [
        (group, Episode("timeout", error="too slow") if lost else Episode("done", score=1.0))
        for group, each in enumerate(failed)
        for lost in each
    ]
    rows = [each for each in episodes for _ in range(num_rows)]
    groups, played = zip(*rows, strict=True)
    ones = [[1]] * len(rows)
    texts = [PromptRow("x", [], "1") for _ in rows]
    prompts = Prompts(Ragged.from_rows(ones, torch.int64), torch.tensor(groups), texts)
    scores = torch.ones(len(rows))
    return respond(prompts, ones, episodes=[*played]).grow(
        Scored, scores=scores, components={}, failed=scores > 2
    )


def collected(*batches: Scored, needs: Needs = Needs.NOTHING) -> Scored:
    most = f"algorithm.filter_groups.max_num_gen_batches={len(batches)}"
    sampling, algorithm = collector(set(), most, needs=needs)
    source = iter(batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithm, "collect", lambda *_: next(source))
        return sampling.collect(cast(Any, None), 1)[0]


def test_failed_episodes_and_groups_of_one_are_left_out() -> None:
    left = collected(played([False, True], [False, False], [True, False, False]))
    assert left.group.tolist() == [1] * 4 + [2] * 4, "a single episode with two rows is alone"
    assert len(collected(played([False], [True]))) == 2, "a group of one is complete"
    with pytest.raises(RlctlError, match="all episodes failed: timeout 4×; the first: too slow"):
        collected(played([True], [True]))
    with pytest.raises(RlctlError, match="all episodes failed or are alone in their group"):
        collected(played([True, False], [False, True]))
