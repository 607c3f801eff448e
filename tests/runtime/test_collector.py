"""Prompts of a step: order of the loader, samplers that learn from scores, dynamic sampling."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.episodes import Episode
from rlctl.errors import ConfigError, RlctlError
from rlctl.plugins import load_with_params
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.batch import Prompts, Ragged, Scored
from rlctl.runtime.data.loader import PromptLoader, PromptSet
from rlctl.runtime.data.mixing import MixedSampler, Part
from rlctl.runtime.data.samplers import StatefulSampler, random_order, sequential_order
from rlctl.runtime.data.unusable_prompts import truncate
from rlctl.runtime.training.collector import Collector
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


NAMES = ("curriculum", "thompson")


def make(name: str, num_prompts: int = 20, seed: int = 1, **params: float) -> StatefulSampler:
    sampler = load_with_params("samplers", name, params, "data.sampler_params")
    return sampler(num_prompts, seed)


def observed(sampler: StatefulSampler, draws: int) -> list[list[int]]:
    """Draw and observe: prompts below 5 are always wrong, from 15 always right, others mixed."""
    batches = []
    for _ in range(draws):
        batch = sampler.draw(4)
        batches.append(batch)
        sampler.observe(batch, [0.0 if i < 5 else 1.0 if i >= 15 else 0.5 for i in batch])
    return batches


@pytest.mark.parametrize("name", NAMES)
def test_mixed_prompts_are_drawn_most_once_all_have_been_scored(name: str) -> None:
    batches = observed(make(name), 40)
    assert all(len(set(batch)) == 4 for batch in batches), "no prompt twice in a batch"
    late = [prompt for batch in batches[20:] for prompt in batch]
    assert sum(5 <= prompt < 15 for prompt in late) / len(late) > 0.75, "half would be chance"
    if name == "curriculum":
        first = [prompt for batch in batches[:5] for prompt in batch]
        assert sorted(first) == list(range(20)), "each prompt is scored once before any other"


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_sampler_draws_the_same(name: str) -> None:
    straight, resumed = make(name), make(name)
    observed(straight, 7)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.metrics() == straight.metrics()
    assert observed(resumed, 7) == observed(straight, 7)
    assert resumed.state_dict() == straight.state_dict()
    assert observed(make(name, seed=2), 3) != observed(make(name), 3)


def test_the_pool_excludes_solved_and_hopeless_prompts_but_explores() -> None:
    sampler = make("curriculum", explore=0.25)
    observed(sampler, 12)
    late = [sum(prompt < 5 or prompt >= 15 for prompt in batch) for batch in observed(sampler, 20)]
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
        truncate(list(range(10)), compose("ppo_trainer", overrides).config.data, "file: row 0")
        == left
    )
