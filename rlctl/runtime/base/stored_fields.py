"""Ragged fields whose values stay in the process or node that computed them.

A worker's result is *detached*: its per-token values become one shard, and the controller gets the
row lengths and a reference to the shard. Selecting and joining rows touches only row numbers.
Whoever reads `values` fetches them, which on the controller only code that needs all tokens does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import is_not
from typing import Any, Protocol

import torch
from torch import Tensor

from rlctl.runtime.base.batch import B, Batch, Ragged
from rlctl.runtime.base.ragged import Packed, token_positions


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
        starts = self.offsets[rows]
        ends = self.offsets[rows + 1]
        return self.values.tensor(token_positions(starts, ends - starts))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_fields, (self.values, Packed.from_tensor(self.offsets))


def _unpickled_fields(values: Packed, offsets: Packed) -> PackedRows:
    return PackedRows(values, offsets.tensor())


Fields = Mapping[str, PackedRows]  # content of a shard, by name


class Shard(Protocol):
    """Reference to the values of a worker's result, wherever they are."""

    def fetch(self) -> Fields:
        """Return the fields, without a copy on the node that has them."""
        ...


@dataclass(frozen=True, eq=False)
class HeldShard(Shard):
    """Fields that travel with their reference."""

    fields: Fields

    def fetch(self) -> Fields:
        return self.fields


class RowRefs:
    """References to B rows in shards; the fields of a result share them.

    Row i is row `row[i]` of `shards[shard[i]]`. The last selection and join are kept, because each
    field asks for the same.
    """

    def __init__(self, shards: Sequence[Shard], shard: Tensor, row: Tensor) -> None:
        """Refer to rows; `shard` and `row` are (B,) int32."""
        self.shards = shards  # empty: the shard of the result that has these rows
        self.shard = shard
        self.row = row
        self._last: tuple[tuple[object, ...], RowRefs] | None = None

    @classmethod
    def of_shard(cls, num_rows: int, shards: Sequence[Shard] = ()) -> RowRefs:
        """Refer to all rows of the one shard in `shards`, or of one to come."""
        numbers = torch.arange(num_rows, dtype=torch.int32)
        return cls(shards, torch.zeros_like(numbers), numbers)

    def select(self, index: Tensor) -> RowRefs:
        """Return the references at `index` (N,) int64."""
        columns = self.shard, self.row
        return self._once(
            (index,), lambda: RowRefs(self.shards, *(x.index_select(0, index) for x in columns))
        )

    def joined(self, others: Sequence[RowRefs]) -> RowRefs:
        """Return these references and those of `others`, in order."""
        return self._once(tuple(others), lambda: _join([self, *others]))

    def in_shard(self, shard: Shard) -> RowRefs:
        """Return these references to `shard`, which was to come."""
        return self._once((shard,), lambda: RowRefs((shard,), self.shard, self.row))

    def _once(self, key: tuple[object, ...], make: Callable[[], RowRefs]) -> RowRefs:
        """Return `make()`, or the last result if it was made for the same objects."""
        last = self._last
        if last is None or len(last[0]) != len(key) or any(map(is_not, last[0], key)):
            last = self._last = (key, make())
        return last[1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle row numbers, and the references of the shards that have these rows."""
        used, shard = self.shard.unique(return_inverse=True)
        shards = [self.shards[i] for i in used.tolist()] if self.shards else []
        numbers = (Packed.from_tensor(column.long()) for column in (shard, self.row))
        return _unpickled, (shards, *numbers)


def _join(parts: Sequence[RowRefs]) -> RowRefs:
    first = [0, *accumulate(len(refs.shards) for refs in parts)]
    return RowRefs(
        [shard for refs in parts for shard in refs.shards],
        torch.cat([refs.shard + start for refs, start in zip(parts, first, strict=False)]),
        torch.cat([refs.row for refs in parts]),
    )


def _unpickled(shards: Sequence[Shard], shard: Packed, row: Packed) -> RowRefs:
    return RowRefs(shards, shard.tensor().int(), row.tensor().int())


class StoredRagged(Ragged):
    """Rows in shards. `values` (T, ...) fetches them and keeps them."""

    def __init__(self, lengths: Tensor, name: str, refs: RowRefs) -> None:
        """Refer to the rows `refs`, of `lengths` (B,) int64, of field `name`."""
        vars(self).update(lengths=lengths, name=name, refs=refs)

    name: str
    refs: RowRefs

    def __getattr__(self, name: str) -> Tensor:
        """Fetch `values` at their first use."""
        if name != "values":
            raise AttributeError(name)
        values = vars(self)["values"] = self._fetch()
        return values

    def _fetch(self) -> Tensor:
        order: list[Tensor] = []
        parts: list[Tensor] = []
        refs = self.refs
        for number in refs.shard.unique().tolist():
            rows = (refs.shard == number).nonzero().flatten()
            order.append(rows)
            parts.append(refs.shards[number].fetch()[self.name].select(refs.row[rows].long()))
        if not parts:
            return torch.empty(0)
        taken = torch.cat(order)
        fetched = Ragged(torch.cat(parts), self.lengths[taken])
        if not bool((taken[1:] > taken[:-1]).all()):
            fetched = fetched.select(taken.argsort())
        return fetched.values

    def like(self, values: Tensor) -> Ragged:
        return Ragged(torch.empty(int(self.lengths.sum()), device="meta"), self.lengths).like(
            values
        )

    def select(self, index: Tensor) -> Ragged:
        # Nothing is fetched.
        lengths = self.lengths.index_select(0, index)
        return StoredRagged(lengths, self.name, self.refs.select(index))

    def to(self, device: torch.device | str) -> Ragged:
        """Return the same rows on `device`: themselves for the CPU, which fetches them if used."""
        if torch.device(device).type == "cpu":
            return self
        return super().to(device)

    def _joined(self, parts: Sequence[Ragged]) -> Ragged:
        first, *rest = (self._stored(part) for part in parts)
        if any(stored.name != self.name for stored in (first, *rest)):
            return super()._joined(parts)
        lengths = torch.cat([stored.lengths for stored in parts])
        return StoredRagged(lengths, self.name, first.refs.joined([stored.refs for stored in rest]))

    def _stored(self, rows: Ragged) -> StoredRagged:
        """Return rows as they are, or small ones that came with their values in a shard."""
        if isinstance(rows, StoredRagged):
            return rows
        shard = HeldShard({self.name: PackedRows.from_ragged(rows)})
        return StoredRagged(rows.lengths, self.name, RowRefs.of_shard(len(rows), (shard,)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_rows, (Packed.from_tensor(self.lengths), self.name, self.refs)


def _unpickled_rows(lengths: Packed, name: str, refs: RowRefs) -> StoredRagged:
    return StoredRagged(lengths.tensor(), name, refs)


def detach(result: Any, min_bytes: int) -> tuple[dict[str, PackedRows] | None, Any]:
    """Return the ragged fields of a call's result as the content of a shard, and the result.

    In the latter the values of these fields are missing; see `attach`. A result with less than
    `min_bytes` of them has no shard (None) and keeps them.
    """
    fields: dict[str, PackedRows] = {}
    refs: dict[int, RowRefs] = {}  # by number of rows
    num_bytes = 0

    def measure(_: str, value: Ragged) -> Ragged:
        nonlocal num_bytes
        num_bytes += value.values.nbytes
        return value

    def take(name: str, value: Ragged) -> Ragged:
        fields[name] = PackedRows.from_ragged(value)
        if len(value) not in refs:
            refs[len(value)] = RowRefs.of_shard(len(value))
        return StoredRagged(value.lengths, name, refs[len(value)])

    _map_ragged(result, measure)
    if not num_bytes or num_bytes < min_bytes:
        return None, result
    return fields, _map_ragged(result, take)


def attach(result: Any, shard: Shard) -> Any:
    """Return a detached result with the reference to its shard."""

    def refer(_: str, value: Ragged) -> Ragged:
        if not isinstance(value, StoredRagged) or value.refs.shards:
            return value
        return StoredRagged(value.lengths, value.name, value.refs.in_shard(shard))

    return _map_ragged(result, refer)


def _map_ragged(value: Any, change: Callable[[str, Ragged], Ragged], name: str = "") -> Any:
    """Replace the ragged fields of a batch, or of a tuple of results, by name."""
    if isinstance(value, Ragged):
        return change(name, value)
    if isinstance(value, tuple):
        return tuple(_map_ragged(item, change, f"{name}{i}.") for i, item in enumerate(value))
    if not isinstance(value, Batch):
        return value
    return dataclasses.replace(
        value,
        **{
            field.name: change(f"{name}{field.name}", found)
            for field in dataclasses.fields(value)
            if isinstance(found := getattr(value, field.name), Ragged)
        },
    )


def fetched(batch: B) -> B:
    """Return the batch with the values of all fields."""
    return _map_ragged(batch, lambda _, value: Ragged(value.values, value.lengths))
