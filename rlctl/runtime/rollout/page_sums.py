"""Checksum of the bytes of a bucket, which a processor computes while they are in its cache."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

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
        self._data, self._num_done = data, 0
        self._pages = data[: self._end].view(torch.int64).view(-1, _PAGE // 8)
        self._sums = self._pages.new_empty(len(self._pages))

    def add(self, end: int) -> None:
        """Sum the pages before byte `end`, which change no more."""
        done, self._num_done = self._num_done, end // _PAGE
        if self._num_done > done:
            pages = slice(done, self._num_done)
            torch.sum(self._pages[pages], 1, out=self._sums[pages])

    def checksum(self, start: int) -> int:
        """Return the CRC-32 of all sums, and of the bytes after the last page, from `start` on."""
        self.add(self._end)
        for part in (self._sums, self._data[self._end :]):
            start = zlib.crc32(part.cpu().numpy().tobytes(), start)
        return start


def blocks(target: Tensor, source: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Divide a copy of `source` (N, ...) to a contiguous `target` into those for `PageSums`."""
    source = source.detach()
    if not (target.is_cpu and source.is_cpu and source.is_contiguous()):
        return [(target, source)]
    size = _BLOCK * torch.get_num_threads() // target.itemsize
    return zip(target.view(-1).split(size), source.view(-1).split(size), strict=True)
