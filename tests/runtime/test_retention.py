"""Retention of checkpoints: the newest and the best ones, step by step and all at once."""

from __future__ import annotations

import pytest

from rlctl.runtime.checkpoint.store import Retention

SCORES: dict[int, dict[str, float | None]] = {
    10: {"acc": 0.5},
    20: {"acc": 0.9},
    30: {"acc": None},
    40: {},
    50: {"acc": 0.9},
    60: {"acc": 0.1},
    70: {"acc": 0.2},
}


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(None, "acc", True, 1), [10, 20, 30, 40, 50, 60, 70]),
        (Retention(2, None, True, 1), [60, 70]),
        (Retention(1, "acc", True, 1), [20, 70]),  # ties go to the older
        (Retention(1, "acc", True, 2), [20, 50, 70]),
        (Retention(1, "acc", False, 1), [60, 70]),
        (Retention(2, "acc", False, 2), [60, 70]),
        (Retention(1, "unknown", True, 3), [70]),
        (Retention(9, "acc", True, 1), [10, 20, 30, 40, 50, 60, 70]),
    ],
)
def test_retention_keeps_the_newest_and_the_best(retention: Retention, kept: list[int]) -> None:
    assert [step for step in SCORES if step not in retention.to_delete(SCORES)] == kept
    left: dict[int, dict[str, float | None]] = {}
    for step, metrics in SCORES.items():  # adding one checkpoint at a time gives the same result
        left[step] = metrics
        for gone in retention.to_delete(left):
            del left[gone]
        assert step in left
    assert list(left) == kept
