"""Changed values of buckets in place of whole buckets, for slow networks.

In bfloat16 most weights are the same after a step with a small learning rate: of the 8 bits of a
mantissa, a step of 1e-6 moves none. Sender and receiver keep the last bytes of each bucket, so a
receiver has the whole bucket again, whose checksum it verifies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.rollout.weight_sync import Bucket, BucketHeader

_PLACE = torch.int32
_VALUE = torch.int16
_CHANGE_BYTES = _PLACE.itemsize + _VALUE.itemsize


class WeightChanges:
    """Last bytes that a member of a group has sent or received, by part and number of the bucket.

    A member keeps them as long as the group lasts, so both ends always have the same ones.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], Tensor] = {}  # (N,) uint8

    def encode(self, bucket: Bucket) -> Tensor:
        """Return the places (K,) int32 and values (K,) of changed 16-bit words, as bytes.

        Returns all bytes (N,) of the bucket if it is new, or the changes are more than half of it.
        """
        key = (bucket.header.part.index, bucket.header.number)
        data = bucket.data
        last = self._last.get(key)
        if last is not None and len(last) == len(data) < _VALUE.itemsize << 31:
            words = data.view(_VALUE)
            places = (words != last.view(_VALUE)).nonzero().squeeze(1)
            if _CHANGE_BYTES * len(places) <= len(data) // 2:
                values = words[places]
                last.view(_VALUE)[places] = values
                return torch.cat([places.to(_PLACE).view(torch.uint8), values.view(torch.uint8)])
        self._last[key] = data.clone()
        return data

    def decode(self, header: BucketHeader, data: Tensor) -> Bucket:
        """Return the whole bucket, in host memory, from what `encode` returns.

        `data` has all its bytes (N,) or changes (6 K,). It is valid until the next of its number.
        """
        key = (header.part.index, header.number)
        data = data.cpu()
        if len(data) == sum(entry.num_padded for entry in header.entries):
            self._last[key] = data
        else:
            end = len(data) // _CHANGE_BYTES * _PLACE.itemsize
            places = data[:end].view(_PLACE).long()
            values = data[end:].view(_VALUE)
            self._last[key].view(_VALUE)[places] = values
        return Bucket(header, self._last[key])
