"""Tensors in the smallest integer type that holds them exactly, as numpy arrays: the wire format.

Ray's object store shares the arrays between processes without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
        bits, flags = _BITS[value.element_size()], value.bool()
        if torch.equal(flags.to(value.dtype).view(bits), value.view(bits)):  # no −0
            return flags
    return value
