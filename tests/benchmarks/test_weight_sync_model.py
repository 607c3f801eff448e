"""The number of calls of a weight sync between GPUs, and the time that follows from it."""

from __future__ import annotations

import pytest

from benchmarks.weight_sync_model import measured


@pytest.mark.parametrize(("scale", "limit_s"), [(("7B", 8, 8), 0.6), (("32B", 32, 32), 3.0)])
def test_a_sync_is_as_fast_as_its_link(scale: tuple[str, int, int], limit_s: float) -> None:
    _, ranks, _ = scale
    row = measured(*scale, bandwidth=50e9, latency=6e-5)
    assert row["seconds"] <= limit_s
    assert row["calls of the group"] == (ranks + 1) * row["buckets"] + 1
