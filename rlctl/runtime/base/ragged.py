"""Per-token fields: rows of different lengths without padding.

Axes: B rows, T tokens of all rows, R of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.runtime.base.ops import to_device

_INTEGERS = (torch.int8, torch.int16, torch.int32)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer type by bytes


@dataclass(frozen=True, eq=False)
class Packed:
    """Tensor as an array of a smaller type: token ids as int32, masks of 0 and 1 as bool."""

    array: np.ndarray[Any, np.dtype[Any]]
    dtype: torch.dtype  # of the tensor

    @classmethod
    def from_tensor(cls, value: Tensor) -> Packed:
        """Pack `value` (N, ...); its device is not kept."""
        value = value.detach().cpu().contiguous()
        small = _narrow(value)
        if small.dtype is torch.bfloat16:  # unknown to numpy
            small = small.view(torch.int16)
        return cls(small.numpy(), value.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.array.nbytes

    def tensor(self, index: Tensor | None = None) -> Tensor:
        """Return a copy of the tensor (N, ...), or of its entries at `index` (M,) int64: (M, ...).

        The copy is of the original type; the array may be read-only shared memory.
        """
        array = self.array if index is None else self.array[index.numpy()]
        bits = torch.int16 if self.dtype is torch.bfloat16 else self.dtype
        wide = array.astype(torch.empty(0, dtype=bits).numpy().dtype, copy=index is None)
        return torch.from_numpy(wide).view(self.dtype)


def _narrow(value: Tensor) -> Tensor:
    """Return `value` in a smaller type without loss, or as it is."""
    if not value.numel():
        return value
    if value.dtype is torch.int64:
        low, high = (int(bound) for bound in value.aminmax())
        for dtype in _INTEGERS:
            limits = torch.iinfo(dtype)
            if limits.min <= low and high <= limits.max:
                return value.to(dtype)
        return value
    if value.is_floating_point() and bool(((value == 0) | (value == 1)).all()):
        bits = _BITS[value.element_size()]
        flags = value.bool()
        if torch.equal(flags.to(value.dtype).view(bits), value.view(bits)):  # no −0
            return flags
    return value


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths, concatenated into one flat tensor."""

    values: Tensor  # (T, ...)
    lengths: Tensor  # (B,) int64, sums to T

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[int] | Sequence[float] | Tensor],
        dtype: torch.dtype | None = None,
    ) -> Ragged:
        """Concatenate B lists or tensors (N,) of any N; float32 if empty without `dtype`."""
        parts = [torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = [part.shape[0] for part in parts]  # faster than `len`
        parts = [part for part, length in zip(parts, lengths, strict=True) if length]
        values = torch.empty(0, dtype=dtype or torch.float32)
        if parts:
            values = torch.cat(parts)
        return cls(values, torch.tensor(lengths, dtype=torch.int64))

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Ragged:
        """Drop the padding of a right-padded (B, R, ...), given the row `lengths` (B,)."""
        keep = torch.arange(padded.shape[1]) < lengths[:, None]  # (B, R)
        return cls(padded[keep.to(padded.device)], lengths)

    def __len__(self) -> int:
        """Return the number of rows B."""
        return len(self.lengths)

    @cached_property
    def offsets(self) -> Tensor:
        """Start of each row in `values`, then the end of the last, int64: (B+1,)."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @cached_property
    def row_of_token(self) -> Tensor:
        """Row index of each token: (T,) int64, on the device of `values`."""
        rows = torch.arange(len(self)).repeat_interleave(self.lengths)
        return to_device(rows, self.values.device)

    def rows(self) -> list[Tensor]:
        """Return one view of `values` (T, ...) per row."""
        return list(self.values.split(self.lengths.tolist()))

    def like(self, values: Tensor) -> Ragged:
        """Return the same rows with other `values` (T, ...). Raises ValueError for another T."""
        if len(values) != len(self.values):
            raise ValueError(f"expected {len(self.values)} values, got {len(values)}")
        return Ragged(values, self.lengths)

    def padded(self) -> Tensor:
        """Return a rectangle (B, R, ...), right-padded with 0."""
        longest = int(self.lengths.max()) if len(self) else 0
        keep = torch.arange(longest) < self.lengths[:, None]  # (B, R)
        out = self.values.new_zeros((*keep.shape, *self.values.shape[1:]))
        out[keep.to(out.device)] = self.values
        return out

    def sums(self) -> Tensor:
        """Sum each row: values (T,) -> (B,). Empty rows give 0."""
        return self.values.new_zeros(len(self)).index_add_(0, self.row_of_token, self.values)

    def select(self, index: Tensor) -> Ragged:
        """Copy the rows at `index` (N,) int64, in that order, into a Ragged of N rows."""
        lengths = self.lengths[index]
        if len(index) and bool((index.diff() == 1).all()):  # adjacent rows: one copy of a slice
            start = int(self.offsets[index[0]])
            return Ragged(self.values[start : start + int(lengths.sum())].clone(), lengths)
        positions = token_positions(self.offsets[:-1][index], lengths)
        return Ragged(self.values[to_device(positions, self.values.device)], lengths)

    def to(self, device: torch.device | str) -> Ragged:
        """Return the same rows with `values` on `device`; lengths stay on the CPU."""
        return Ragged(to_device(self.values, device), self.lengths)

    def joined(self, others: Sequence[Ragged]) -> Ragged:
        """Join these rows with those of `others`, in order. Nothing stored elsewhere is fetched."""
        parts = [self, *others]
        stored = next((part for part in parts if type(part) is not Ragged), self)
        return stored._joined(parts)

    def _joined(self, parts: Sequence[Ragged]) -> Ragged:
        """Join rows of the kind of these, or plain ones."""
        lengths = torch.cat([part.lengths for part in parts])
        return Ragged(torch.cat([part.values for part in parts]), lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (Packed.from_tensor(self.values), Packed.from_tensor(self.lengths))


def _unpacked(values: Packed, lengths: Packed) -> Ragged:  # in the smallest exact type
    return Ragged(values.tensor(), lengths.tensor())


def padded(field: Ragged | None) -> Tensor | None:
    """Return the rectangle (B, R, ...) of a field, if there is one."""
    return None if field is None else field.padded()


def token_positions(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the positions (T,) int64 of the tokens of rows that start at `starts` (N,)."""
    shift = starts - torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
    return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)
