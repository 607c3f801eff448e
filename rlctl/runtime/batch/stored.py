"""Ragged fields whose values stay in the process or node that computed them.

A worker's result is *detached*: its per-token values become one shard, and the controller gets the
row lengths and a reference to the shard. Selecting and joining rows touches only row numbers.
Whoever reads `values` fetches them, which on the controller only code that needs all tokens does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlctl.runtime.batch import B, Batch, Ragged
from rlctl.runtime.batch.packed import Packed
from rlctl.runtime.batch.ragged import token_positions


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Ragged rows in the wire format."""

    values: Packed  # (T, ...)
    offsets: Tensor  # (B+1,) int64: start of each row, then the end of the last

    @classmethod
    def from_ragged(cls, rows: Ragged) -> PackedRows:
        """Pack the rows."""
        return cls(Packed.from_tensor(rows.values), rows.offsets)

    def select(self, rows: Tensor) -> Tensor:
        """Return the values (T, ...) of the rows (N,) int64, in that order."""
        starts, ends = self.offsets[rows], self.offsets[rows + 1]
        return self.values.tensor(token_positions(starts, ends - starts))


Fields = Mapping[str, PackedRows]  # content of a shard, by name


class Shard(Protocol):
    """Reference to the values of a worker's result, wherever they are."""

    def fetch(self) -> Fields:
        """Return the fields, without a copy on the node that has them."""
        ...


@dataclass(frozen=True, eq=False)
class HeldShard:
    """Implements `Shard`: fields that travel with their reference."""

    fields: Fields

    def fetch(self) -> Fields:
        """See `Shard`."""
        return self.fields


class StoredRagged(Ragged):
    """Rows in shards. `values` (T, ...) fetches them and keeps them."""

    def __init__(
        self, lengths: Tensor, name: str, shards: Sequence[Shard], shard: Tensor, row: Tensor
    ) -> None:
        """Row i is row `row[i]` of field `name` in `shards[shard[i]]`; all tensors are (B,)."""
        vars(self).update(lengths=lengths, name=name, shards=shards, shard=shard, row=row)

    @classmethod
    def of_shard(cls, lengths: Tensor, name: str, shards: Sequence[Shard] = ()) -> StoredRagged:
        """Return all rows, of `lengths` (B,), of the one shard in `shards`, or of one to come."""
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        return cls(lengths, name, shards, torch.zeros_like(numbers), numbers)

    name: str
    shards: Sequence[Shard]  # empty: of the result that has this field
    shard: Tensor
    row: Tensor

    def __getattr__(self, name: str) -> Tensor:
        """Fetch `values` at their first use."""
        if name != "values":
            raise AttributeError(name)
        values = vars(self)["values"] = self._fetch()
        return values

    def _fetch(self) -> Tensor:
        order, parts, lengths = list[Tensor](), list[Tensor](), self.lengths
        for number in self.shard.unique().tolist():
            rows = (self.shard == number).nonzero().flatten()
            order.append(rows)
            parts.append(self.shards[number].fetch()[self.name].select(self.row[rows].long()))
        if not parts:
            return torch.empty(0)
        taken = torch.cat(order)
        fetched = Ragged(torch.cat(parts), lengths[taken])
        is_ordered = bool((taken[1:] > taken[:-1]).all())
        return fetched.values if is_ordered else fetched.select(taken.argsort()).values

    def like(self, values: Tensor) -> Ragged:
        """See `Ragged`; `values`: (T, ...)."""
        return Ragged(torch.empty(int(self.lengths.sum()), device="meta"), self.lengths).like(
            values
        )

    def select(self, index: Tensor) -> Ragged:
        """See `Ragged`; `index`: (N,). Nothing is fetched."""
        return StoredRagged(
            self.lengths[index], self.name, self.shards, self.shard[index], self.row[index]
        )

    def to(self, device: torch.device | str) -> Ragged:
        """Return the same rows on `device`: themselves for the CPU, which fetches them if used."""
        return self if torch.device(device).type == "cpu" else super().to(device)

    def _joined(self, parts: Sequence[Ragged]) -> Ragged:
        stored = [self._stored(each) for each in parts]
        if any(each.name != self.name for each in stored):
            return super()._joined(parts)
        first = [0]
        for each in stored:
            first.append(first[-1] + len(each.shards))
        return StoredRagged(
            torch.cat([each.lengths for each in stored]),
            self.name,
            [shard for each in stored for shard in each.shards],
            torch.cat([each.shard + start for each, start in zip(stored, first, strict=False)]),
            torch.cat([each.row for each in stored]),
        )

    def _stored(self, rows: Ragged) -> StoredRagged:
        """Return rows as they are, or small ones that came with their values in a shard."""
        if isinstance(rows, StoredRagged):
            return rows
        shard = HeldShard({self.name: PackedRows.from_ragged(rows)})
        return StoredRagged.of_shard(rows.lengths, self.name, (shard,))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle row numbers, and the references of the shards that have these rows."""
        used, shard = self.shard.unique(return_inverse=True)
        shards = [self.shards[i] for i in used.tolist()] if self.shards else []
        numbers = (self.lengths.numpy(), shard.int().numpy(), self.row.numpy())
        return _unpickled, (self.name, shards, *numbers)


def _unpickled(
    name: str,
    shards: Sequence[Shard],
    lengths: np.ndarray[Any, np.dtype[np.int64]],
    shard: np.ndarray[Any, np.dtype[np.int32]],
    row: np.ndarray[Any, np.dtype[np.int32]],
) -> StoredRagged:
    # Arrays in Ray's object store are read-only, which torch warns about.
    return StoredRagged(
        torch.from_numpy(lengths.copy()),
        name,
        shards,
        torch.from_numpy(shard.copy()),
        torch.from_numpy(row.copy()),
    )


def detach(result: Any, min_bytes: int) -> tuple[dict[str, PackedRows] | None, Any]:
    """Return the ragged fields of a call's result as the content of a shard, and the result.

    In the latter the values of these fields are missing; see `attach`. A result with less than
    `min_bytes` of them has no shard (None) and keeps them.
    """
    fields: dict[str, PackedRows] = {}
    num_bytes = 0

    def measure(_: str, value: Ragged) -> Ragged:
        nonlocal num_bytes
        num_bytes += value.values.nbytes
        return value

    def take(name: str, value: Ragged) -> Ragged:
        fields[name] = PackedRows.from_ragged(value)
        return StoredRagged.of_shard(value.lengths, name)

    _map_ragged(result, measure)
    if not num_bytes or num_bytes < min_bytes:
        return None, result
    return fields, _map_ragged(result, take)


def attach(result: Any, shard: Shard) -> Any:
    """Return a detached result with the reference to its shard."""

    def refer(_: str, value: Ragged) -> Ragged:
        if not isinstance(value, StoredRagged) or value.shards:
            return value
        return StoredRagged(value.lengths, value.name, (shard,), value.shard, value.row)

    return _map_ragged(result, refer)


def _map_ragged(value: Any, change: Callable[[str, Ragged], Ragged], name: str = "") -> Any:
    """Replace the ragged fields of a batch, or of a tuple of results, by name."""
    if isinstance(value, Ragged):
        return change(name, value)
    if isinstance(value, tuple):
        return tuple(_map_ragged(each, change, f"{name}{i}.") for i, each in enumerate(value))
    if not isinstance(value, Batch):
        return value
    return dataclasses.replace(
        value,
        **{
            each.name: change(f"{name}{each.name}", found)
            for each in dataclasses.fields(value)
            if isinstance(found := getattr(value, each.name), Ragged)
        },
    )


def is_stored(batch: Batch) -> bool:
    """Return True if any ragged field of the batch is stored elsewhere."""
    fields = dataclasses.fields(batch)
    return any(isinstance(getattr(batch, each.name), StoredRagged) for each in fields)


def fetched(batch: B) -> B:
    """Return the batch with the values of all fields."""
    return _map_ragged(batch, lambda _, value: Ragged(value.values, value.lengths))
