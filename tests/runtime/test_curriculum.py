"""Order of prompts: of the loader, and of samplers that learn from scores, with their state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.plugins import load_with_params
from rlctl.recipes.compose import compose
from rlctl.runtime.data.loader import PromptLoader, PromptSet, _truncate
from rlctl.runtime.data.samplers import (
    MixedSampler,
    Part,
    StatefulSampler,
    random_order,
    sequential_order,
)
from rlctl.runtime.training.collector import Collector
from tests.rows import rows_of
from tests.runtime.test_collector import SIZE, FakeAlgorithm, collector, ground_truths

NAMES = ("curriculum", "thompson")


def make(name: str, num_prompts: int = 20, seed: int = 1, **params: float) -> StatefulSampler:
    sampler = load_with_params("samplers", name, params, "data.sampler_params")
    return sampler(num_prompts, seed)


def played(sampler: StatefulSampler, draws: int) -> list[list[int]]:
    """Draw and observe: prompts below 5 are always wrong, from 15 always right, others mixed."""
    batches = []
    for _ in range(draws):
        batch = sampler.draw(4)
        batches.append(batch)
        sampler.observe(batch, [0.0 if i < 5 else 1.0 if i >= 15 else 0.5 for i in batch])
    return batches


@pytest.mark.parametrize("name", NAMES)
def test_mixed_prompts_are_drawn_most_once_all_have_been_scored(name: str) -> None:
    batches = played(make(name), 40)
    assert all(len(set(batch)) == 4 for batch in batches), "no prompt twice in a batch"
    late = [prompt for batch in batches[20:] for prompt in batch]
    assert sum(5 <= prompt < 15 for prompt in late) / len(late) > 0.75, "half would be chance"
    if name == "curriculum":
        first = [prompt for batch in batches[:5] for prompt in batch]
        assert sorted(first) == list(range(20)), "each prompt is scored once before any other"


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_sampler_draws_the_same(name: str) -> None:
    straight, resumed = make(name), make(name)
    played(straight, 7)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.metrics() == straight.metrics()
    assert played(resumed, 7) == played(straight, 7)
    assert resumed.state_dict() == straight.state_dict()
    assert played(make(name, seed=2), 3) != played(make(name), 3)


def test_the_pool_excludes_solved_and_hopeless_prompts_but_explores() -> None:
    sampler = make("curriculum", explore=0.25)
    played(sampler, 12)
    late = [sum(prompt < 5 or prompt >= 15 for prompt in batch) for batch in played(sampler, 20)]
    assert late == [1] * 20, "one of four from outside the pool"
    metrics = sampler.metrics()
    assert metrics["curriculum/pool_share"] == 0.5
    assert metrics["curriculum/unscored"] == 0
    assert metrics["curriculum/mean_0_to_0.25"] == 0.25
    assert metrics["curriculum/mean_0.5_to_0.75"] == 0.5
    assert metrics["curriculum/mean_0.75_to_1"] == 0.25


@pytest.mark.parametrize("name", NAMES)
def test_scores_may_have_another_range_and_prompts_to_avoid_come_last(name: str) -> None:
    sampler = make(name, 6, min_score=-1.0, max_score=1.0)
    assert sorted(sampler.draw(4, avoid=range(4)))[-2:] == [4, 5]
    sampler.observe([0], [0.0])
    assert sampler.metrics()["curriculum/mean_0.5_to_0.75"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"low": 0.9, "high": 0.1}, "high should not be smaller than low"),
        ({"min_score": 1.0}, "max_score should be larger than min_score"),
        ({"hihg": 1.0}, "did you mean 'high'"),
    ],
)
def test_wrong_settings_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make("curriculum", **params)
    assert message in f"{error.value} {error.value.problems[0].hint}"


def test_parts_are_drawn_in_the_ratio_of_their_weights() -> None:
    parts = (Part(0, 3, 0.25), Part(3, 13, 0.75))

    def mixed() -> MixedSampler:
        return MixedSampler(parts, lambda number, seed: make("curriculum", number, seed), 1)

    sampler, resumed = mixed(), mixed()
    batches = [sampler.draw(8) for _ in range(4)]
    assert [sum(prompt < 3 for prompt in batch) for batch in batches] == [2] * 4
    sampler.observe(batches[0], [1.0] * 8)
    assert sampler.metrics()["curriculum/unscored"] == pytest.approx(5 / 13)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert [resumed.draw(5) for _ in range(3)] == [sampler.draw(5) for _ in range(3)]


def stateful(mixed: set[int], *settings: str) -> tuple[Collector, FakeAlgorithm]:
    plan, algorithm = collector(mixed, *settings)
    old = plan.loader
    sampler = make("curriculum", len(old.prompts))
    plan.loader = PromptLoader(old.prompts, SIZE, sequential_order, 1, sampler)
    return plan, algorithm


@pytest.mark.parametrize("enable", ["true", "false"])
def test_the_collector_observes_and_resumes_with_and_without_dynamic_sampling(enable: str) -> None:
    setting = f"algorithm.filter_groups.enable={enable}"
    mixed = set(range(0, 40, 3))
    straight, algorithm = stateful(mixed, setting)
    seen = [ground_truths(straight.collect(cast(Any, None), step)[0]) for step in (1, 2, 3)]
    state = json.loads(json.dumps(straight.state_dict()))
    assert sorted(state["sampler"]["state"]["prompts"]) == sorted(
        {prompt for batch in algorithm.prompts for prompt in batch}
    )
    assert all(len(set(truths)) == SIZE for truths in seen), "no prompt twice in a step"
    again, _ = stateful(mixed, setting)
    again.load_state_dict(state, 3)
    for step in (4, 5, 6):
        scored, metrics = straight.collect(cast(Any, None), step)
        resumed, again_metrics = again.collect(cast(Any, None), step)
        assert ground_truths(scored) == ground_truths(resumed)
        assert metrics == again_metrics
        assert "curriculum/pool_share" in metrics
    assert again.state_dict() == straight.state_dict()


def test_a_state_of_other_data_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    plan, _ = stateful({1})
    plan.load_state_dict({"sampler": {"num_prompts": 7, "state": {}}}, 1)
    assert "starts from scratch" in caplog.text


def test_a_stateful_sampler_needs_scores(here: Path) -> None:
    from rlctl.runtime.planning.plan import make_plan

    with pytest.raises(ConfigError, match=r"data\.sampler=thompson learns from scores"):
        make_plan(compose("sft", ["data.sampler=thompson"]), inline=True)


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
