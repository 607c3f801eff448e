"""Weight channels from the trainer to engines in other processes: Ray's object store, or links."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import ray

from rlctl.recipes import schema
from rlctl.runtime.cluster.engines import failure_reason
from rlctl.runtime.cluster.link import Link
from rlctl.runtime.model.engine_weights import Selection
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.weight_sync import Bucket, Part, uses_host_memory


def channel(
    rollout: schema.Rollout,
    engines: dict[int, Any],
    sync_id: int,
    rank_info: RankInfo,
    members: Collection[int],
    selection: Selection = Selection.ALL,
) -> StoreChannel:
    """Return the configured channel to `engines` (Ray handles by engine number).

    `members` are the numbers of all engines of the pool.
    """
    if uses_host_memory(rollout, rank_info.device):
        return StoreChannel(engines, sync_id, rank_info, selection)
    return LinkChannel(engines, sync_id, rank_info, members, selection)


@dataclass(eq=False)
class StoreChannel:
    """Implements `WeightChannel` with Ray's object store: all engines read one copy of a bucket.

    `send` waits until the previous bucket was received, so the store holds only a few buckets.
    """

    engines: dict[int, Any]
    sync_id: int
    rank_info: RankInfo
    selection: Selection = Selection.ALL
    lost: dict[int, str] = field(default_factory=dict[int, str])  # reason by engine number
    num_buckets: int = 0
    in_flight: dict[ray.ObjectRef, int] = field(default_factory=dict)  # engine number by call
    device: str = "cpu"

    def send(self, bucket: Bucket) -> None:
        """See `WeightChannel`."""
        self.send_stored(ray.put(bucket))

    def send_stored(self, stored: ray.ObjectRef) -> None:
        """Send a bucket that is in the object store."""
        self.num_buckets += 1
        self._wait()
        self.in_flight = {
            engine.receive.remote(self.sync_id, stored): number
            for number, engine in self._remaining().items()
        }

    def close(self, version: int, num_parts: int = 1) -> dict[int, str]:
        """Finish the sync; return the engines lost during it: number -> reason."""
        self._wait()
        self.in_flight = {
            engine.end.remote(self.sync_id, self.num_buckets, version, num_parts): number
            for number, engine in self._remaining().items()
        }
        self._wait()
        return self.lost

    def _remaining(self) -> dict[int, Any]:
        return {
            number: engine for number, engine in self.engines.items() if number not in self.lost
        }

    def _mark_failed(self, number: int, reason: str) -> None:
        self.lost[number] = reason

    def _wait(self) -> None:
        """Wait until every engine has received the previous bucket; mark those that fail."""
        if not self.in_flight:
            return
        timeout_s = self.rank_info.timeout_s
        calls = list(self.in_flight)
        received, late = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        for result in received:
            reason = failure_reason(result)
            if reason is not None:
                self._mark_failed(self.in_flight[result], reason)
        for result in late:
            reason = f"it did not receive a bucket of weights within {timeout_s:g} s"
            self._mark_failed(self.in_flight[result], reason)
        self.in_flight = {}


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

    def close(self, version: int, num_parts: int = 1) -> PublishedWeights:
        """Return the weights of this rank."""
        del num_parts
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

    def send(self, to: StoreChannel) -> dict[int, str]:
        """Send the weights to the engines of the channel `to`; return the lost ones, as it does."""
        store = StoreChannel(to.engines, to.sync_id, to.rank_info)
        for bucket in self.buckets_for(to.selection):
            store.send_stored(bucket)
        store.num_buckets //= self.num_parts
        return store.close(self.version)


@dataclass
class _CachedLink:
    engine: Any  # Ray actor id: a restarted engine has another one
    link: Link


class LinkChannel(StoreChannel):
    """Implements `WeightChannel` with links: Ray carries headers, links carry data between devices.

    A link is made at an engine's first weight sync and cached in this process until it is lost.
    """

    links: ClassVar[dict[int, _CachedLink]] = {}

    def __init__(
        self,
        engines: dict[int, Any],
        sync_id: int,
        rank_info: RankInfo,
        members: Collection[int],
        selection: Selection = Selection.ALL,
    ) -> None:
        super().__init__(engines, sync_id, rank_info, selection)
        self.device = rank_info.device
        self.members = members

    def close(self, version: int, num_parts: int = 1) -> dict[int, str]:
        """See `StoreChannel`. Links to engines that have left the pool are closed."""
        for number in self.links.keys() - self.members:
            self._close(number)
        return super().close(version, num_parts)

    def send(self, bucket: Bucket) -> None:
        self.num_buckets += 1
        self._wait()
        for number, engine in self._remaining().items():
            link = self._link(number, engine, bucket.header.part)
            if link is not None:
                received = engine.receive.remote(self.sync_id, bucket.header)
                try:
                    link.send(bucket)
                except RuntimeError as error:  # the engine closed its end, or is no more
                    self._mark_failed(number, f"its link broke: {error}")
                else:
                    self.in_flight[received] = number

    def _link(self, number: int, engine: Any, part: Part) -> Link | None:
        """Return the link to `engine`, or None if it cannot be made and the engine is lost."""
        cached = self.links.get(number)
        if cached is not None and cached.engine == engine._actor_id:
            return cached.link
        self._close(number)
        host = ray.util.get_node_ip_address()
        listener = Link.listen(host)
        connected = engine.connect.remote(host, listener.port, part.index)
        try:
            link = Link.to_engine(listener, self.rank_info)
        except RuntimeError as error:  # torch raises it for stores, sockets and NCCL alike
            reason: object = error
            if ray.wait([connected], timeout=0)[0]:
                reason = failure_reason(connected, raise_rlctl_errors=False) or error
            self._mark_failed(
                number,
                f"no link to it could be made ({reason}); "
                "rollout.checkpoint_engine.backend=object_store does not need one",
            )
            return None
        self.links[number] = _CachedLink(engine._actor_id, link)
        return link

    def _mark_failed(self, number: int, reason: str) -> None:
        super()._mark_failed(number, reason)
        self._close(number)

    def _close(self, number: int) -> None:
        cached = self.links.pop(number, None)
        if cached is not None:
            cached.link.close()
