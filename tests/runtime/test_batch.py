from __future__ import annotations

import dataclasses
import pickle

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.runtime.batch import Ragged
from rlctl.runtime.model.sequences import concat_ragged
from tests.workers import experience

rows_of_ints = st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6)


@settings(deadline=None)
@given(rows_of_ints)
def test_ragged_matches_a_list_of_lists(rows: list[list[int]]) -> None:
    ragged = Ragged.from_rows(rows, dtype=torch.int64)
    assert [row.tolist() for row in ragged.rows()] == rows
    assert ragged.sums().tolist() == [sum(row) for row in rows]
    width = max(map(len, rows))
    assert ragged.padded().tolist() == [row + [0] * (width - len(row)) for row in rows]
    back = Ragged.from_padded(ragged.padded(), ragged.lengths)
    assert torch.equal(back.values, ragged.values)
    assert [row.tolist() for row in concat_ragged(ragged, ragged).rows()] == [
        row + row for row in rows
    ]


@settings(deadline=None)
@given(rows_of_ints, st.randoms())
def test_select_in_any_order(rows: list[list[int]], random: st.DrawFn) -> None:
    first = random.randrange(len(rows))
    adjacent = list(range(first, random.randint(first, len(rows))))
    for index in ([random.randrange(len(rows)) for _ in range(4)], adjacent):
        taken = Ragged.from_rows(rows, dtype=torch.int64).select(torch.tensor(index).long())
        assert [row.tolist() for row in taken.rows()] == [rows[i] for i in index]


def test_pickled_batch_has_the_same_values() -> None:
    batch = dataclasses.replace(experience(), components={"odd": torch.tensor([0.5, -0.0] * 4)})
    read = pickle.loads(pickle.dumps(batch))
    assert type(read) is type(batch)
    for name in ("group", "scores", "failed"):
        expected, found = getattr(batch, name), getattr(read, name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert torch.equal(read.components["odd"].signbit(), batch.components["odd"].signbit())
    assert torch.equal(read.advantages.values, batch.advantages.values)
    assert read.finish == batch.finish
