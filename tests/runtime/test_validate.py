"""Metrics of a validation pass."""

from __future__ import annotations

import pytest

from rlctl.runtime.training.validation import validation_metrics
from rlctl.tracking.tracker import Sample


def sample(score: float, response: str = "", source: str = "a", **components: float) -> Sample:
    return Sample(
        "p", response, "t", score, components, length=4, finish="stop", data_source=source
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


def test_best_and_majority_of_several_responses() -> None:
    """The bootstrap is close to the exact expectations, enumerated over all 4^4 draws."""
    from collections import Counter
    from itertools import product

    answers, values = ["x", "x", "x", "y"], [1.0, 1.0, 1.0, 0.0]
    draws = list(product(range(4), repeat=4))
    majority = sum(
        {"x": 1.0, "y": 0.0}[Counter(answers[i] for i in draw).most_common(1)[0][0]]
        for draw in draws
    ) / len(draws)
    best = sum(max(values[i] for i in draw) for draw in draws) / len(draws)
    metrics = validation_metrics(
        [sample(v, f"thinking\n#### {a}") for a, v in zip(answers, values, strict=True)], 4
    )
    assert metrics["val-core/a/acc/mean@4"] == 0.75
    assert metrics["val-core/a/acc/maj@4/mean"] == pytest.approx(majority, abs=0.03)
    assert metrics["val-core/a/acc/best@4/mean"] == pytest.approx(best, abs=0.02)
