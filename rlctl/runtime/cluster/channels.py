"""Channels of weights to engines: a group of processes, or Ray's object store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import ray
from torch import Tensor

from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.rollout.engine_weights import Selection
from rlctl.runtime.rollout.weight_group import (
    BrokenGroupError,
    GroupAddress,
    WeightGroup,
    join_group,
    leave_group,
)
from rlctl.runtime.rollout.weight_sync import WHOLE, Bucket, Part, memory_of

T = TypeVar("T")


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank has sent in a group, and why the group is broken, if it is."""

    num_bytes: int
    failure: str | None


class GroupChannel:
    """Implements `WeightChannel` with a group."""

    def __init__(self, address: GroupAddress, rank_info: RankInfo, selection: Selection) -> None:
        self.address = address
        self.rank_info = rank_info
        self.selection = selection
        self.device = rank_info.device
        self.num_bytes = 0
        self.failure = None

    def allocate(self, size: int, part: Part) -> Tensor:
        """Return bytes (N,), of shared memory where possible."""
        data = self._call(part, lambda group: group.allocate(size))
        return memory_of(self.device)(size, part) if data is None else data

    def send(self, bucket: Bucket) -> None:
        part = bucket.header.part
        self.num_bytes += self._call(part, lambda group: group.send(bucket, part)) or 0

    def close(self, version: int, part: Part = WHOLE) -> Sent:
        self._call(part, lambda group: group.send(version, part))
        return Sent(self.num_bytes, self.failure)

    def _call(self, part: Part, call: Callable[[WeightGroup], T]) -> T | None:
        """Return the result of `call` with the group, joined as the sender of `part`.

        Does nothing once the group is broken: the rank still gathers parameters with the others.
        """
        if self.failure is None:
            try:
                return call(join_group(self.address, part, self.rank_info))
            except BrokenGroupError as error:
                self.failure = str(error)
                leave_group()
        return None


class StoreChannel:
    """Implements `WeightChannel` by keeping all buckets in Ray's object store.

    A bucket is stored as a numpy array, which the processes of a node read without a copy.
    """

    device = "cpu"

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.stored: list[ray.ObjectRef] = []
        self.num_bytes = 0

    def allocate(self, size: int, part: Part) -> Tensor:
        """Return new bytes (N,)."""
        return memory_of("cpu")(size, part)

    def send(self, bucket: Bucket) -> None:
        self.num_bytes += bucket.data.nbytes
        self.stored.append(ray.put(bucket))

    def close(self, version: int, part: Part = WHOLE) -> StoredWeights:
        """Return the weights of this rank."""
        del part
        return StoredWeights(self.stored, version, self.num_bytes)


@dataclass(frozen=True)
class StoredWeights:
    """Weights in Ray's object store. `buckets` has all parts of a bucket one after the other."""

    buckets: Sequence[ray.ObjectRef]
    version: int
    num_bytes: int

    @classmethod
    def join(cls, parts: Sequence[StoredWeights]) -> StoredWeights:
        """Join what the ranks of the trainer have stored."""
        buckets = zip(*(part.buckets for part in parts), strict=True)
        num_bytes = sum(part.num_bytes for part in parts)
        return cls([*chain(*buckets)], parts[0].version, num_bytes)
