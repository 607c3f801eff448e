"""Metrics of rollouts and of a validation pass."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.episodes import Episode
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.algorithms.sft import SFT
from rlctl.runtime.algorithms.stats import rollout_metrics, uniform_groups
from rlctl.runtime.base.batch import Prompts, Ragged, Scored
from rlctl.runtime.base.metrics import to_floats
from rlctl.runtime.training.validation import validation_metrics
from rlctl.tracking.tracker import Sample
from tests.generation import respond


def sample(
    score: float,
    response: str = "",
    source: str = "a",
    pred: str | None = None,
    **components: float,
) -> Sample:
    return Sample(
        "p", response, "t", score, components, 4, finish="stop", data_source=source, pred=pred
    )


def test_one_response_per_prompt() -> None:
    metrics = validation_metrics([sample(1), sample(0), sample(1, source="b"), sample(1)], 1)
    assert metrics["val-core/a/acc/mean@1"] == pytest.approx(2 / 3)
    assert metrics["val-core/b/acc/mean@1"] == 1
    assert metrics["val-aux/a/finished"] == 1
    assert not any("best@" in name for name in metrics)


def test_scores_other_than_0_and_1_are_rewards_unless_there_is_an_acc_component() -> None:
    assert "val-core/a/reward/mean@1" in validation_metrics([sample(0.5)], 1)
    assert (
        validation_metrics([sample(0.5, acc=1.0), sample(0.7, acc=0.0)], 1)["val-core/a/acc/mean@1"]
        == 0.5
    )


def test_rows_without_the_component_of_others_count_by_their_score() -> None:
    mixed = [sample(-1.0, acc=0.0), sample(1.0, acc=1.0), sample(1.0), sample(-1.0)]
    metrics = validation_metrics([*mixed, sample(1.0, source="b")], 1)
    assert metrics["val-core/a/acc/mean@1"] == 0.5
    assert metrics["val-core/b/acc/mean@1"] == 1.0


def test_failed_episodes_have_not_finished() -> None:
    failed = replace(sample(0), episode=Episode("timeout", error="too long"))
    done = replace(sample(1), episode=Episode("done"))
    assert validation_metrics([failed, done], 1)["val-aux/a/finished"] == 0.5


def expected_majority(votes: list[str], values: list[float]) -> float:
    """Return the exact expectation over all draws of as many votes as there are responses."""
    draws = list(product(range(len(votes)), repeat=len(votes)))
    winners = (Counter(votes[i] for i in draw).most_common(1)[0][0] for draw in draws)
    return sum(values[votes.index(winner)] for winner in winners) / len(draws)


def test_best_and_majority_of_several_responses() -> None:
    """The bootstrap is close to the exact expectations, enumerated over all 4^4 draws."""
    answers, values = ["x", "x", "x", "y"], [1.0, 1.0, 1.0, 0.0]
    draws = list(product(range(4), repeat=4))
    majority = expected_majority(answers, values)
    best = sum(max(values[i] for i in draw) for draw in draws) / len(draws)
    metrics = validation_metrics(
        [sample(v, f"thinking\n#### {a}") for a, v in zip(answers, values, strict=True)], 4
    )
    assert metrics["val-core/a/acc/mean@4"] == 0.75
    assert metrics["val-core/a/acc/maj@4/mean"] == pytest.approx(majority, abs=0.03)
    assert metrics["val-core/a/acc/best@4/mean"] == pytest.approx(best, abs=0.02)
    assert metrics["val-aux/a/acc/std@4"] == pytest.approx(statistics.pstdev(values))


def test_pass_at_k_is_the_share_of_solved_subsets() -> None:
    """Compare with all subsets of k responses, and best and worst with all draws of k."""
    groups = [[1.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 5, [1.0, 1.0, 0.0, 1.0, 0.0]]
    metrics = validation_metrics([sample(v) for group in groups for v in group], 5)
    for k, part in ((2, "val-aux"), (4, "val-aux"), (5, "val-core")):
        subsets = [max(some) for group in groups for some in combinations(group, k)]
        assert metrics[f"{part}/a/acc/pass@{k}"] == pytest.approx(statistics.mean(subsets))
        draws = [some for group in groups for some in product(group, repeat=k)]
        best, worst = (statistics.mean(map(choose, draws)) for choose in (max, min))
        assert metrics[f"{part}/a/acc/best@{k}/mean"] == pytest.approx(best, abs=0.03)
        assert metrics[f"val-aux/a/acc/worst@{k}/mean"] == pytest.approx(worst, abs=0.03)
    assert metrics["val-core/a/acc/pass@5"] == pytest.approx(2 / 3)
    other = validation_metrics([sample(0.5), sample(1.0)], 2)
    assert not any("pass@" in name for name in other)
    assert "val-aux/a/reward/worst@2/mean" in other


def test_majority_votes_by_the_extracted_answer() -> None:
    """Three right responses with different words win against two equal wrong ones."""
    preds, values = ["18", "18", "18", "7", "7"], [1.0, 1.0, 1.0, 0.0, 0.0]
    texts = ["so 18", "it is 18", "18!", "7", "7"]
    responses = [
        sample(value, text, pred=pred)
        for value, text, pred in zip(values, texts, preds, strict=True)
    ]
    exact = expected_majority(preds, values)
    assert exact > 0.65
    metrics = validation_metrics(responses, 5)
    assert metrics["val-core/a/acc/maj@5/mean"] == pytest.approx(exact, abs=0.03)


def test_majority_votes_by_the_whole_text_without_an_extracted_answer() -> None:
    """Texts that differ in white space or case are one vote; the last line alone is not."""
    texts = ["A b\nend", "a  B end ", "c\nend", "d\nend"]
    values = [1.0, 1.0, 0.0, 0.0]
    by_text = [sample(value, text) for value, text in zip(values, texts, strict=True)]
    by_pred = [sample(v, pred=p) for v, p in zip(values, ["x", "x", "c", "d"], strict=True)]
    name = "val-core/a/acc/maj@4/mean"
    assert validation_metrics(by_text, 4)[name] == validation_metrics(by_pred, 4)[name]


def test_rows_without_a_component_and_rows_that_were_cut() -> None:
    ids = Ragged.from_rows([[1], [1, 1], [1, 1, 1]], torch.int64)
    prompts = Prompts(ids, torch.arange(3), [PromptRow("x", [], None)] * 3)
    components = {"acc": torch.tensor([1.0, torch.nan, 0.0]), "no": torch.full((3,), torch.nan)}
    scored = respond(prompts, ids, finish=["stop", "length", "stop"]).grow(
        Scored, scores=torch.ones(3), components=components, failed=torch.zeros(3).bool()
    )
    metrics = to_floats(rollout_metrics(PPO, 3, scored))
    assert metrics["reward/acc/mean"] == 0.5
    assert "reward/no/mean" not in metrics
    assert metrics["response_length/clip_ratio"] == pytest.approx(2 / 3)
    without = to_floats(rollout_metrics(SFT, 3, scored))
    assert without == {name: metrics[name] for name in metrics if "_length/" in name}


def test_fraction_of_groups_without_variance() -> None:
    """Groups of 3 (equal), 2 (equal), 3 (not equal) and 1 (not counted): 5 of 8 rows."""
    scores = torch.tensor([0.1, 1.0, 0.1, 1.0, 0.1, 0.0, 1.0, 0.0, 5.0])
    group = torch.tensor([4, 7, 4, 7, 4, 2, 2, 2, 9])
    assert uniform_groups(scores, group)["critic/score/uniform_groups"].value == pytest.approx(
        5 / 8
    )
    assert uniform_groups(scores, torch.arange(9)) == {}
