from __future__ import annotations

import pytest
import torch

from rlctl.runtime.algorithms.stats import uniform_groups


def test_fraction_of_groups_without_variance() -> None:
    """Groups of 3 (equal), 2 (equal), 3 (not equal) and 1 (not counted): 5 of 8 rows."""
    scores = torch.tensor([0.1, 1.0, 0.1, 1.0, 0.1, 0.0, 1.0, 0.0, 5.0])
    group = torch.tensor([4, 7, 4, 7, 4, 2, 2, 2, 9])
    assert uniform_groups(scores, group)["critic/score/uniform_groups"].value == pytest.approx(
        5 / 8
    )
    assert uniform_groups(scores, torch.arange(9)) == {}
