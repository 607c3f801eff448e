"""Copies of weights on CPUs, and their checksums, computed while the bytes are in a cache."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PAGE = 4096  # bytes
_BLOCK = 2**20  # bytes that are copied and then summed while they are in a cache


class PageSums:
    """Sums of the 64-bit words of each page of bytes (N,) uint8, on their device.

    Any changed word changes one of the sums and so the checksum, unless CRCs collide (1 in 2^32);
    so do pages that change places, but not words within a page.
    """

    def __init__(self, data: Tensor) -> None:
        self._end = len(data) // _PAGE * _PAGE
        self._data = data
        self._num_done = 0
        self._pages = data[: self._end].view(torch.int64).view(-1, _PAGE // 8)
        self._sums = self._pages.new_empty(len(self._pages))

    def add(self, end: int) -> None:
        """Sum the pages before byte `end`, which change no more."""
        done = self._num_done
        self._num_done = end // _PAGE
        if self._num_done > done:
            pages = slice(done, self._num_done)
            torch.sum(self._pages[pages], 1, out=self._sums[pages])

    def checksum(self, start: int) -> int:
        """Return the CRC-32 of all sums, and of the bytes after the last page, from `start` on."""
        self.add(self._end)
        for part in (self._sums, self._data[self._end :]):
            start = zlib.crc32(part.cpu().numpy().tobytes(), start)
        return start


def copy_values(
    target: Tensor, source: Tensor, is_done: Callable[[int], object] = lambda _: None
) -> None:
    """Copy `source` (N, ...) to a `target` of the same shape; on CPUs a block at a time.

    `is_done` gets the number of bytes on a CPU that are complete. If the dtype is the same, the C
    library copies; torch would read the target into the cache before.
    """
    source = source.detach()
    if not all(value.is_cpu and value.is_contiguous() for value in (target, source)):
        target.copy_(source)
        if target.is_cpu:
            is_done(target.nbytes)
        return
    values: list[Any] = [target.view(-1), source.view(-1)]
    copy: Callable[[Any, Any], object] = Tensor.copy_
    itemsize = target.itemsize
    if target.dtype == source.dtype:
        values = [value.view(torch.uint8).numpy() for value in values]
        copy = np.copyto
        itemsize = 1
    size = len(values[0])
    step = _BLOCK * torch.get_num_threads() // itemsize
    for start in range(0, size, step):
        end = min(start + step, size)
        copy(values[0][start:end], values[1][start:end])
        is_done(end * itemsize)
