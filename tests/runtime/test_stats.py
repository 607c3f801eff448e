from __future__ import annotations

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.runtime.algorithms.stats import rollout_metrics, uniform_groups
from rlctl.runtime.batch import Ragged, Scored
from rlctl.tracking.metrics import to_floats


def test_rows_without_a_component_and_rows_that_were_cut() -> None:
    ids = Ragged.from_rows([[1], [1, 1], [1, 1, 1]], torch.int64)
    scored = Scored(
        prompt_ids=ids,
        group=torch.arange(3),
        rows=[PromptRow("x", [], None)] * 3,
        response_ids=ids,
        response_mask=ids.like(torch.ones(6)),
        rollout_log_probs=ids.like(torch.zeros(6)),
        finish=["stop", "length", "stop"],
        scores=torch.ones(3),
        components={"acc": torch.tensor([1.0, torch.nan, 0.0]), "no": torch.full((3,), torch.nan)},
        failed=torch.zeros(3, dtype=torch.bool),
    )
    metrics = to_floats(rollout_metrics(scored, 3))
    assert metrics["reward/acc/mean"] == 0.5
    assert "reward/no/mean" not in metrics
    assert metrics["response_length/clip_ratio"] == pytest.approx(2 / 3)


def test_fraction_of_groups_without_variance() -> None:
    """Groups of 3 (equal), 2 (equal), 3 (not equal) and 1 (not counted): 5 of 8 rows."""
    scores = torch.tensor([0.1, 1.0, 0.1, 1.0, 0.1, 0.0, 1.0, 0.0, 5.0])
    group = torch.tensor([4, 7, 4, 7, 4, 2, 2, 2, 9])
    assert uniform_groups(scores, group)["critic/score/uniform_groups"].value == pytest.approx(
        5 / 8
    )
    assert uniform_groups(scores, torch.arange(9)) == {}
