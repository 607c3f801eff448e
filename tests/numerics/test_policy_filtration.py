"""PF-PPO draws rows by weights of their scores."""

from __future__ import annotations

import pytest
import torch

from rlctl.recipes.schema.algorithm import PFPPO
from rlctl.runtime.algorithms.policy_filtration import draw_rows

SCORES = torch.tensor([0.0, 1.0, -2.0, 1.0, 0.5]).repeat(4000)


def shares(method: str, weight_pow: float = 2.0) -> list[float]:
    """Return how often rows of each of the five kinds are drawn."""
    config = PFPPO(reweight_method=method, weight_pow=weight_pow)  # type: ignore[arg-type]
    drawn = draw_rows(SCORES, config, seed=1)
    assert len(drawn) == len(SCORES)
    assert torch.equal(drawn, draw_rows(SCORES, config, seed=1))
    return (torch.bincount(drawn % 5, minlength=5) / len(drawn)).tolist()


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("pow", [0.0, 1.0, 4.0, 1.0, 0.25]),
        ("max_min", [0.0, 1.0, 1.0, 1.0, 0.0]),
        ("max_random", [0.1, 0.4, 0.1, 0.4, 0.1]),
    ],
)
def test_rows_are_drawn_in_proportion_to_their_weights(method: str, weights: list[float]) -> None:
    expected = [weight / sum(weights) for weight in weights]
    assert shares(method) == pytest.approx(expected, abs=0.015)


def test_equal_scores_of_0_are_all_drawn() -> None:
    config = PFPPO(reweight_method="pow", weight_pow=2.0)
    assert len(draw_rows(torch.zeros(50), config, seed=3).unique()) > 20
