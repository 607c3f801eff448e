"""Rows whose values stay with the worker that computed them, and their wire format."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rlctl.runtime.batch import Batch, Ragged
from rlctl.runtime.batch.packed import Packed
from rlctl.runtime.batch.stored import Fields, attach, detach, fetched, is_stored
from tests.runtime.test_dispatch import rollouts

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
    assert is_stored(found)
    assert found.response_ids.lengths.tolist() == [6, 4, 3, 1, 4, 0]
    assert shard.num_reads == other.num_reads == 0
    expected = Batch.concat([first, second]).select(index)
    for name in ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs"):
        whole, own = getattr(fetched(found), name), getattr(expected, name)
        assert torch.equal(whole.values, own.values), name
        assert whole.values.dtype is own.values.dtype
    assert not is_stored(fetched(found))


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
