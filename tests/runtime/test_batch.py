"""Batches of rows, also those whose values stay with the worker that computed them or on disk."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.episodes import Episode, Message
from rlctl.errors import ConfigError
from rlctl.runtime.base.batch import Batch, Ragged, Scored
from rlctl.runtime.base.ragged import Packed
from rlctl.runtime.base.stored_fields import Fields, attach, detach, fetched
from rlctl.runtime.model.sequences import concat_ragged
from rlctl.runtime.training.stored_rollouts import read_rollouts, write_rollouts
from tests.numerics.batches import scored_batch
from tests.runtime.test_dispatch import rollouts
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


LENGTHS = [3, 0, 4, 2, 5]


class Memory:
    """A shard in this process that counts its reads."""

    def __init__(self, fields: Mapping[str, Any] | None) -> None:
        self.fields = fields
        self.num_reads = 0

    def fetch(self) -> Fields:
        self.num_reads += 1
        assert self.fields is not None
        return self.fields


def stored(batch: Batch) -> tuple[Any, Memory]:
    fields, rest = detach(batch, 0)
    shard = Memory(fields)
    return attach(pickle.loads(pickle.dumps(rest)), shard), shard


def test_rows_are_selected_and_joined_without_their_values() -> None:
    first, second = rollouts(LENGTHS), rollouts([1, 6])
    (one, shard), (two, other) = stored(first), stored(second)
    index = torch.tensor([6, 2, 0, 5, 2, 1])
    found = Batch.concat([one, two]).select(index)
    assert found.is_stored
    assert found.response_ids.lengths.tolist() == [6, 4, 3, 1, 4, 0]
    assert shard.num_reads == other.num_reads == 0
    expected = Batch.concat([first, second]).select(index)
    for name in ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs"):
        whole, own = getattr(fetched(found), name), getattr(expected, name)
        assert torch.equal(whole.values, own.values), name
        assert whole.values.dtype is own.values.dtype
    assert not fetched(found).is_stored


def test_parts_of_a_tuple_are_stored_under_names_of_their_own() -> None:
    batch = rollouts([1, 2])
    fields, rest = detach((batch.response_ids, batch.rollout_log_probs, {"n": 1}), 0)
    ids, log_probs, metrics = attach(rest, Memory(fields))
    assert ids.values.tolist() == batch.response_ids.values.tolist()
    assert log_probs.values.tolist() == batch.rollout_log_probs.values.tolist()
    assert metrics == {"n": 1}


@pytest.mark.parametrize(
    ("values", "wire"),
    [
        (torch.tensor([0, 150_000]), np.int32),
        (torch.tensor([-1, 2**40]), np.int64),
        (torch.tensor([3, 3]), np.int8),
        (torch.tensor([0.0, 1.0]), np.bool_),
        (torch.tensor([-0.0, 1.0]), np.float32),
        (torch.tensor([0.5, float("nan")]), np.float32),
        (torch.tensor([0.5, -2.0], dtype=torch.bfloat16), np.int16),
        (torch.empty(0, dtype=torch.int64), np.int64),
    ],
)
def test_values_travel_in_the_smallest_exact_type(values: torch.Tensor, wire: Any) -> None:
    packed = Packed.from_tensor(values)
    assert packed.array.dtype == wire
    packed.array.flags.writeable = False
    ragged = Ragged(values, torch.tensor([len(values)]))
    for found in (packed.tensor(), pickle.loads(pickle.dumps(ragged)).values):
        assert found.dtype is values.dtype
        assert found.tolist() == pytest.approx(values.tolist(), abs=0, nan_ok=True)
        assert found.signbit().tolist() == values.signbit().tolist()


@pytest.mark.parametrize("numbers", [[], [0, 0, 1, 0]])
def test_stored_rollouts_are_read_back(tmp_path: Path, numbers: list[int]) -> None:
    episodes = [Episode("done", [Message("tool", str(i), trained=False)]) for i in range(2)]
    same = {"data_source": "x", "ground_truth": 1}
    images = {"a": (b"picture",), "b": ()}
    prompts = cast(Any, [SimpleNamespace(prompt=p, images=images[p], **same) for p in "ab"])
    fields = {
        "rows": [prompts[i] for i in (1, 1, 0, 0)],
        "episodes": [episodes[i] for i in numbers],
        "images": [(), (), (b"picture", b"of a reply"), (b"picture",)],
    }
    scored = dataclasses.replace(scored_batch(), **fields)
    write_rollouts(tmp_path / "rollouts", scored, [1, 1, 0, 0])
    found = read_rollouts(tmp_path / "rollouts", prompts, Scored)
    assert found.rows == scored.rows
    assert found.images == scored.images
    other = SimpleNamespace(prompt="a", images=images["a"], data_source="x", ground_truth=2)
    repainted = SimpleNamespace(prompt="a", images=(b"photo",), **same)
    for changed in ([other, prompts[1]], [repainted, prompts[1]], prompts[:1]):
        with pytest.raises(ConfigError, match="the data has changed"):
            read_rollouts(tmp_path / "rollouts", changed, Scored)
    assert [each.messages[0].text for each in found.episodes] == [str(i) for i in numbers]
    assert found.episode_of_row.tolist() == scored.episode_of_row.tolist()
    for each in dataclasses.fields(scored):
        value, other = getattr(scored, each.name), getattr(found, each.name)
        if isinstance(value, Ragged):
            assert torch.equal(value.values, other.values)
            assert torch.equal(value.lengths, other.lengths)
