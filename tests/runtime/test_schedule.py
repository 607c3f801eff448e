from __future__ import annotations

import pytest

from rlctl.runtime.algorithms.schedule import Schedule


def test_constant_after_a_linear_warm_up() -> None:
    lr = Schedule(peak=1.0, num_steps=10, num_warmup=4, kind="constant", min_ratio=0.0)
    assert [lr(step) for step in (1, 2, 4, 5, 10)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_cosine_and_linear_end_at_the_minimum() -> None:
    cosine = Schedule(peak=2.0, num_steps=10, num_warmup=0, kind="cosine", min_ratio=0.1)
    linear = Schedule(peak=2.0, num_steps=10, num_warmup=0, kind="linear", min_ratio=0.1)
    assert cosine(5) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert linear(5) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert cosine(10) == pytest.approx(0.2)
    assert linear(10) == linear(20) == pytest.approx(0.2)
