"""Tests of balancing rows between ranks and of splitting them into micro-batches."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.runtime.base.balance import TokenCounts, balance, micro_batches, row_cost


@settings(max_examples=40, deadline=None)
@given(
    costs=st.lists(st.integers(0, 10_000), max_size=40),
    parts=st.integers(1, 9),
    equal_size=st.booleans(),
)
def test_every_row_goes_to_one_part(costs: list[int], parts: int, equal_size: bool) -> None:
    shares = balance(torch.tensor(costs, dtype=torch.float64), parts, equal_size)
    assert len(shares) == parts
    assert sorted(itertools.chain(*(share.tolist() for share in shares))) == list(range(len(costs)))
    assert all(share.tolist() == sorted(share.tolist()) for share in shares)
    if equal_size:
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= (len(costs) % parts > 0)


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("parts", [2, 8])
def test_totals_are_within_one_percent(parts: int, equal_size: bool) -> None:
    """Balance 512 rows of log-normal lengths, which are common in practice."""
    lengths = (
        torch.randn(512, generator=torch.Generator().manual_seed(0))
        .mul(0.7)
        .add(5.5)
        .exp()
        .long()
        .clamp(1, 2048)
    )
    costs = row_cost(lengths, 896)
    totals = torch.stack([costs[share].sum() for share in balance(costs, parts, equal_size)])
    assert float(totals.max() / totals.mean()) < 1.001


def test_balance_by_hand() -> None:
    def shares(costs: list[float], parts: int, equal_size: bool) -> list[list[int]]:
        return [share.tolist() for share in balance(torch.tensor(costs), parts, equal_size)]

    assert shares([3, 9, 5, 4, 1], 2, equal_size=False) == [[0, 1], [2, 3, 4]]
    assert shares([10, 1, 1, 1], 2, equal_size=False) == [[0], [1, 2, 3]]
    assert shares([10, 1, 1, 1], 2, equal_size=True) == [[0, 3], [1, 2]]
    assert shares([10, 1, 1, 1, 1], 3, equal_size=True) == [[0], [1, 3], [2, 4]]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=30),
    budget=st.integers(1, 120),
    at_least=st.integers(1, 12),
)
def test_micro_batches_keep_the_budget(lengths: list[int], budget: int, at_least: int) -> None:
    cuts = [
        cut.tolist()
        for cut in micro_batches(
            TokenCounts.of_rows(torch.tensor(lengths, dtype=torch.int64)), budget, at_least
        )
    ]
    assert sorted(itertools.chain(*cuts)) == list(range(len(lengths)))
    assert all(cut and (len(cut) == 1 or sum(lengths[i] for i in cut) <= budget) for cut in cuts)
    assert len(cuts) >= min(at_least, len(lengths))
    flat = [lengths[i] for cut in cuts for i in cut]
    assert flat == sorted(flat, reverse=True)


def test_micro_batches_by_hand() -> None:
    lengths = torch.tensor([3, 9, 4, 4, 30])
    assert [cut.tolist() for cut in micro_batches(TokenCounts.of_rows(lengths), 12)] == [
        [4],
        [1],
        [2, 3, 0],
    ]
    assert [
        cut.tolist() for cut in micro_batches(TokenCounts.of_rows(lengths), 1000, at_least=3)
    ] == [
        [4, 1],
        [2],
        [3, 0],
    ]


def test_micro_batches_count_a_prompt_once() -> None:
    """Keep rows of a prompt together, the longest row first, and split only full micro-batches."""
    counts = TokenCounts(
        lengths=torch.tensor([15, 12, 11, 30, 13, 12]),
        prompt=torch.tensor([0, 1, 0, 2, 1, 0]),
        prompt_lengths=torch.tensor([10, 8, 10, 5, 8, 10]),
    )
    cuts = [cut.tolist() for cut in micro_batches(counts, 30)]
    assert cuts == [[3], [0, 5, 2], [4, 1]]
    assert [counts.together(torch.tensor(cut)).tolist() for cut in cuts] == [
        [30],
        [15, 2, 1],
        [13, 4],
    ]
    assert [cut.tolist() for cut in micro_batches(counts, 17)] == [[3], [0, 5], [2], [4, 1]]
