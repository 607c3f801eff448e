"""Weights in Ray's object store, from where engines load them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import ray

from rlctl.runtime.model.engine_weights import Selection
from rlctl.runtime.rollout.weight_sync import WHOLE, Bucket, Part


class PublishingChannel:
    """Implements `WeightChannel` by keeping all buckets in Ray's object store.

    The trainer continues while engines read them, and a restarted engine gets the same weights.
    """

    device = "cpu"

    def __init__(self, selection: Selection = Selection.ALL) -> None:
        self.selection = selection
        self.stored: list[ray.ObjectRef] = []
        self.num_bytes = 0

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
