"""Channels of weights to engines: a group of processes, or Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import ray
from torch import Tensor

from rlctl.runtime.model.engine_weights import Selection
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.weight_group import (
    BrokenGroupError,
    GroupAddress,
    WeightGroup,
    join_group,
    leave_group,
)
from rlctl.runtime.rollout.weight_sync import WHOLE, Bucket, Part, memory_of


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank has sent in a group, and why the group is broken, if it is."""

    num_bytes: int
    failure: str | None


class GroupChannel:
    """Implements `WeightChannel` with a group."""

    def __init__(self, address: GroupAddress, rank_info: RankInfo, selection: Selection) -> None:
        self.address, self.rank_info, self.selection = address, rank_info, selection
        self.device = rank_info.device
        self.num_bytes, self.failure = 0, None

    def allocate(self, size: int, part: Part) -> Tensor:
        """Return bytes (N,), of shared memory where possible; join the group."""
        group = self._group(part)
        return memory_of(self.device)(size, part) if group is None else group.allocate(size)

    def send(self, bucket: Bucket) -> None:
        self._send(bucket, bucket.header.part)

    def close(self, version: int, part: Part = WHOLE) -> Sent:
        self._send(version, part)
        return Sent(self.num_bytes, self.failure)

    def _send(self, message: Bucket | int, part: Part) -> None:
        try:
            if (group := self._group(part)) is not None:
                self.num_bytes += group.send(message, part)
        except BrokenGroupError as error:
            self._leave(error)

    def _group(self, part: Part) -> WeightGroup | None:
        if self.failure is not None:  # the rank still gathers parameters with the other ranks
            return None
        try:
            return join_group(self.address, part, self.rank_info)
        except BrokenGroupError as error:
            self._leave(error)
            return None

    def _leave(self, error: BrokenGroupError) -> None:
        self.failure = str(error)
        leave_group()


class PublishingChannel:
    """Implements `WeightChannel` by keeping all buckets in Ray's object store.

    The trainer continues while engines read them, and a restarted engine gets the same weights.
    """

    device = "cpu"

    def __init__(self, selection: Selection = Selection.ALL) -> None:
        self.selection = selection
        self.stored: list[ray.ObjectRef] = []
        self.num_bytes = 0

    def allocate(self, size: int, part: Part) -> Tensor:
        """Return new bytes (N,)."""
        return memory_of("cpu")(size, part)

    def send(self, bucket: Bucket) -> None:
        """See `WeightChannel`."""
        self.num_bytes += bucket.data.nbytes
        self.stored.append(ray.put(bucket))

    def close(self, version: int, part: Part = WHOLE) -> PublishedWeights:
        """Return the weights of this rank."""
        del part
        return PublishedWeights(self.stored, version, self.num_bytes)


@dataclass(frozen=True)
class PublishedWeights:
    """Weights in Ray's object store, from where engines load them at any time.

    `buckets` has the `num_parts` parts of a bucket one after the other, and so has `frozen`: the
    parameters that are published once, for engines without weights.
    """

    buckets: Sequence[ray.ObjectRef]
    version: int
    num_bytes: int
    num_parts: int = 1
    frozen: Sequence[ray.ObjectRef] = ()

    @classmethod
    def join(cls, parts: Sequence[PublishedWeights]) -> PublishedWeights:
        """Join what the ranks of the trainer have published."""
        buckets = zip(*(part.buckets for part in parts), strict=True)
        num_bytes = sum(part.num_bytes for part in parts)
        return cls([*chain(*buckets)], parts[0].version, num_bytes, len(parts))

    def buckets_for(self, selection: Selection) -> list[ray.ObjectRef]:
        """Return the buckets of engines that lack `selection`: ALL or CHANGING."""
        return [*(self.frozen if selection is Selection.ALL else ()), *self.buckets]
