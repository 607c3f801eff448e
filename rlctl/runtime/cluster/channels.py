"""The ways of weights from the trainer to engines in other processes: through Ray's object store, or from device to device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray.exceptions import RayActorError

from rlctl.recipes import schema
from rlctl.runtime.cluster.engines import failure
from rlctl.runtime.cluster.link import Link
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.weight_sync import Bucket, WeightChannel, uses_host_memory


def channel(
    rollout: schema.Rollout, engines: dict[int, Any], sync_id: int, rank_info: RankInfo
) -> WeightChannel:
    """The way to `engines` (handles, by number) that the configuration names."""
    return (StoreChannel if uses_host_memory(rollout, rank_info.device) else LinkChannel)(
        engines, sync_id, rank_info
    )


class StoreChannel:
    """Implements `WeightChannel`: each block is put into Ray's object store once, and all engines read it there.

    One block is on its way at a time: an engine takes one up, has another at hand and checks a third, and no more are in the store.
    """

    device = "cpu"

    def __init__(self, engines: dict[int, Any], sync_id: int, rank_info: RankInfo) -> None:
        self.engines = engines
        self.sync_id = sync_id  # its number
        self.rank_info = rank_info
        self.lost: dict[int, str] = {}
        self.num_blocks = 0
        self.on_the_way: dict[ray.ObjectRef, int] = {}

    def send(self, block: Bucket) -> None:
        """See `WeightChannel`."""
        stored = ray.put(block)
        self.num_blocks += 1
        self._wait()
        self.on_the_way = {
            engine.receive.remote(self.sync_id, stored): number
            for number, engine in self._living().items()
        }

    def close(self) -> dict[int, str]:
        """See `WeightChannel`."""
        self._wait()
        self.on_the_way = {
            engine.end.remote(self.sync_id, self.num_blocks): number
            for number, engine in self._living().items()
        }
        self._wait()
        return self.lost

    def _living(self) -> dict[int, Any]:
        return {
            number: engine for number, engine in self.engines.items() if number not in self.lost
        }

    def _mark_failed(self, number: int, reason: str) -> None:
        self.lost[number] = reason

    def _wait(self) -> None:
        """Until every engine has taken the block before, or is lost."""
        if not self.on_the_way:
            return
        timeout_s = self.rank_info.timeout_s
        taken, late = ray.wait(
            list(self.on_the_way), num_returns=len(self.on_the_way), timeout=timeout_s
        )
        for answer in taken:
            try:
                ray.get(answer)
            except RayActorError as error:
                self._mark_failed(self.on_the_way[answer], str(error.error_msg))
        for answer in late:
            self._mark_failed(
                self.on_the_way[answer],
                f"it did not take a block of weights within {timeout_s:g} s",
            )
        self.on_the_way = {}


@dataclass
class _Held:
    engine: Any  # its id: one that is started again in the same place has another
    link: Link


class LinkChannel(StoreChannel):
    """Implements `WeightChannel`: a block is announced to every engine by Ray, and its bytes go by links from device to device.

    Links are made at an engine's first hand-over and kept in this process until the engine is lost.
    """

    links: ClassVar[dict[int, _Held]] = {}

    def __init__(self, engines: dict[int, Any], sync_id: int, rank_info: RankInfo) -> None:
        super().__init__(engines, sync_id, rank_info)
        self.device = rank_info.device

    def send(self, block: Bucket) -> None:
        """See `WeightChannel`."""
        self.num_blocks += 1
        self._wait()
        for number, engine in self._living().items():
            link = self._link(number, engine)
            if link is not None:
                self.on_the_way[engine.receive.remote(self.sync_id, block.header())] = number
                link.send(block)

    def _link(self, number: int, engine: Any) -> Link | None:
        held = self.links.get(number)
        if held is not None and held.engine == engine._actor_id:
            return held.link
        self._close(number)
        host = ray.util.get_node_ip_address()
        door = Link.listen(host)
        there = engine.connect.remote(host, door.port)
        try:
            link = Link.to_engine(door, self.rank_info)
        except RuntimeError as error:  # whatever torch raises of stores, sockets and NCCL is one
            reason = (
                failure(there, ours_ends_the_run=False) if ray.wait([there], timeout=0)[0] else None
            ) or error
            self._mark_failed(
                number,
                f"no link to it could be made ({reason}); rollout.checkpoint_engine.backend=object_store needs none",
            )
            return None
        self.links[number] = _Held(engine._actor_id, link)
        return link

    def _mark_failed(self, number: int, reason: str) -> None:
        super()._mark_failed(number, reason)
        self._close(number)

    def _close(self, number: int) -> None:
        held = self.links.pop(number, None)
        if held is not None:
            held.link.close()
