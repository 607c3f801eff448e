"""Groups of senders and engines, all in this process."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.rollout import shared_memory, weight_group
from rlctl.runtime.rollout.rendezvous import listen
from rlctl.runtime.rollout.shared_memory import SharedMemory
from rlctl.runtime.rollout.signed_store import SignedStore, new_secret, open_store
from rlctl.runtime.rollout.weight_group import (
    Broadcast,
    BrokenGroupError,
    GroupAddress,
    WeightGroup,
)
from rlctl.runtime.rollout.weight_sync import (
    WHOLE,
    Bucket,
    Part,
    memory_of,
    to_buckets,
    uses_object_store,
    whole,
)
from tests.distributed.ranks import rank_info
from tests.fake_nccl import FakeNCCL
from tests.runtime.test_weights import num_bytes, parameters
from tests.second_device import SecondDevice

NUM_PARTS, NUM_ENGINES = 2, 2
SECRET = new_secret()
CPU = replace(rank_info(), timeout_s=3600.0)
GPU = replace(CPU, device="cuda")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNCCL]:
    """Let this machine have GPUs, and NCCL between them."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    return FakeNCCL.reset()


@pytest.fixture
def store() -> SignedStore:
    store = open_store(listen("127.0.0.1", 4), 4, timedelta(seconds=60))
    return SignedStore(store, SECRET)


def part_of(index: int, device: str) -> Iterator[Bucket]:
    """Yield the buckets of a part, which has some rows of each parameter."""

    def rows() -> Iterator[tuple[str, Tensor, int]]:
        for name, value in parameters():
            part = value.reshape(-1).tensor_split(NUM_PARTS)[index]
            yield name, part, value.numel()

    part = Part(index, NUM_PARTS)
    return to_buckets(rows(), part, torch.bfloat16, 30_000, memory_of(device))


def send(address: GroupAddress, index: int, where: RankInfo, num_buckets: int = 99) -> None:
    """Send a part, or some buckets of it before this member is lost."""
    FakeNCCL.gpu.number = index
    with SecondDevice("cuda") if where.device == "cuda" else nullcontext():
        group, part = WeightGroup(address, Part(index, NUM_PARTS), where), Part(index, NUM_PARTS)
        for bucket in [*part_of(index, where.device)][:num_buckets]:
            group.send(bucket, part)
        if num_buckets < 99:
            group.close()
        else:
            group.send(7, part)


def receive(address: GroupAddress, number: int, where: RankInfo) -> tuple[list[Bucket], int]:
    """Return the buckets that an engine receives, on the CPU, and the version."""
    FakeNCCL.gpu.number = NUM_PARTS + number
    with SecondDevice("cuda") if where.device == "cuda" else nullcontext():
        weights = Broadcast(WeightGroup(address, number, where))
        buckets = []
        for bucket in weights:
            bucket.verify()
            buckets.append(Bucket(bucket.header, bucket.data.cpu()))
        return buckets, weights.version


def begin(
    executor: ThreadPoolExecutor, store: SignedStore, where: RankInfo, num_buckets: int = 99
) -> tuple[list[Future[None]], list[Future[tuple[list[Bucket], int]]]]:
    """Start two senders, of which the second may be lost, and two engines."""
    address = GroupAddress("127.0.0.1", store.inner.port, NUM_ENGINES, SECRET)
    counts = (99, num_buckets)
    return (
        [executor.submit(send, address, i, where, counts[i]) for i in range(NUM_PARTS)],
        [executor.submit(receive, address, number, where) for number in range(NUM_ENGINES)],
    )


@pytest.mark.parametrize("way", ["shared memory", "gloo", "nccl"])
def test_all_parts_arrive_in_all_engines(
    way: str, store: SignedStore, nccl: type[FakeNCCL], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = GPU if way == "nccl" else CPU
    if way == "gloo":
        connect = SharedMemory.connect
        monkeypatch.setattr(  # the second engine is on another machine
            SharedMemory,
            "connect",
            lambda member, others: connect(member, others) and (member.sends or member.number != 1),
        )
    with ThreadPoolExecutor(4) as executor:
        senders, engines = begin(executor, store, where)
        for sender in senders:
            sender.result(timeout=600)
        found = [engine.result(timeout=600) for engine in engines]
    sent = [
        bucket
        for turn in zip(*(part_of(index, "cpu") for index in range(NUM_PARTS)), strict=True)
        for bucket in turn
    ]
    assert len(sent) > NUM_PARTS
    assert num_bytes(sent) > 30_000
    for buckets, version in found:
        assert version == 7
        assert [bucket.header for bucket in buckets] == [bucket.header for bucket in sent]
        assert all(torch.equal(a.data, b.data) for a, b in zip(buckets, sent, strict=True))
    if where.device == "cuda":
        members = NUM_PARTS + NUM_ENGINES
        assert nccl.num_communicators == 1
        turns = len(sent) // NUM_PARTS + 1  # the last has the version
        assert nccl.num_calls == members * (len(sent) + turns)


@pytest.mark.parametrize("where", [CPU, GPU], ids=["gloo", "nccl"])
def test_only_changed_values_are_sent_again(
    where: RankInfo, store: SignedStore, nccl: type[FakeNCCL], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the values changes, then none, then all of them."""
    monkeypatch.setattr(SharedMemory, "connect", lambda *_: False)
    store.set(weight_group.ONLY_CHANGES, "")
    address = GroupAddress("127.0.0.1", store.inner.port, 1, SECRET)
    first = torch.randn(10_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    second = first.clone()
    second[::10] += 1
    syncs = [first, second, second, second + 1]

    def receive() -> list[Tensor]:
        FakeNCCL.gpu.number = 1
        received, device = [], SecondDevice("cuda") if where.device == "cuda" else nullcontext()
        with device, closing(WeightGroup(address, 0, where)) as group:
            for _ in syncs:
                [bucket] = Broadcast(group)
                bucket.verify()
                received += [value.clone() for _, value in bucket.tensors()]
        return received

    with ThreadPoolExecutor(1) as executor:
        engine, sizes = executor.submit(receive), []
        FakeNCCL.gpu.number = 0
        with SecondDevice("cuda") if where.device == "cuda" else nullcontext():
            group = WeightGroup(address, WHOLE, where)
            for version, weights in enumerate(syncs):
                rows = whole([("weights", weights)])
                memory = memory_of(where.device)
                [bucket] = to_buckets(rows, WHOLE, torch.bfloat16, 10**6, memory)
                sizes += [group.send(bucket, WHOLE), group.send(version, WHOLE)]
        received = engine.result(timeout=600)
    assert sizes == [20_000, 0, 6_000, 0, 0, 0, 20_000, 0]
    assert all(torch.equal(a, b) for a, b in zip(received, syncs, strict=True))


@pytest.mark.parametrize("keeps", [0, 1, 9])
def test_slots_are_used_again_once_no_tensor_is_in_them(keeps: int, store: SignedStore) -> None:
    """An engine keeps the tensors of its last buckets; those of later slots are copies."""
    address = GroupAddress("127.0.0.1", store.inner.port, 1, SECRET)
    sent = [torch.full((1000 + number,), float(number)) for number in range(20)]

    def receive() -> int:
        group = WeightGroup(address, 0, CPU)
        kept = deque[tuple[Tensor, Tensor]](maxlen=keeps)
        for bucket, expected in zip(Broadcast(group), sent, strict=True):
            bucket.verify()
            ((_, value),) = bucket.tensors()
            kept.append((value, expected))
            assert all(torch.equal(value, expected) for value, expected in kept)
        assert group.shared is not None
        return len(group.shared._reader._slots)

    with ThreadPoolExecutor(1) as executor:
        engine = executor.submit(receive)
        group = WeightGroup(address, WHOLE, CPU)
        rows = whole((str(number), value) for number, value in enumerate(sent))
        for bucket in to_buckets(
            rows, WHOLE, torch.float32, 1, lambda size, _: group.allocate(size)
        ):
            group.send(bucket, WHOLE)
        group.send(7, WHOLE)
        assert engine.result(timeout=600) == {0: 5, 1: 5, 9: 12}[keeps]


def test_a_lost_member_lets_all_others_leave(store: SignedStore) -> None:
    with ThreadPoolExecutor(4) as executor:
        senders, engines = begin(executor, store, CPU, num_buckets=1)
        senders[1].result(timeout=600)
        for other in (senders[0], *engines):
            with pytest.raises(BrokenGroupError):
                other.result(timeout=600)


def test_all_leave_a_group_that_is_dissolved(store: SignedStore) -> None:
    """The second sender does not come."""
    address = GroupAddress("127.0.0.1", store.inner.port, NUM_ENGINES, SECRET)
    with ThreadPoolExecutor(3) as executor:
        waiting = [executor.submit(send, address, 0, CPU)]
        waiting += [executor.submit(receive, address, number, CPU) for number in range(2)]
        store.set(weight_group.BROKEN, "")
        for member in waiting:
            with pytest.raises(BrokenGroupError, match="another member of the group was lost"):
                member.result(timeout=600)


@pytest.mark.parametrize("where", [CPU, GPU], ids=["cpu", "cuda"])
def test_waiting_for_an_absent_member_has_a_deadline(
    where: RankInfo, store: SignedStore, nccl: type[FakeNCCL], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_group, "CONNECT_S", 0.5)
    with pytest.raises(BrokenGroupError, match="no group could be formed"):
        WeightGroup(GroupAddress("127.0.0.1", store.inner.port, 1, SECRET), WHOLE, where)


def test_groups_that_cannot_be_formed_leave_no_files(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not come; then the second of two engines is on another machine."""
    monkeypatch.setattr(weight_group, "CONNECT_S", 0.01)

    def count() -> int:
        return sum("pipe:" in link or "rlctl-" in link for link in own_files())

    before = count()
    with pytest.raises(BrokenGroupError, match="no group could be formed"):
        WeightGroup(GroupAddress("127.0.0.1", store.inner.port, 1, SECRET), WHOLE, CPU)
    assert count() == before
    with closing(SharedMemory(0)) as engine, closing(SharedMemory(WHOLE)) as sender:
        far = engine.address.replace("pipe:", "pipe:9")
        assert not sender.connect([engine.address, far])
    assert count() == before


def own_files() -> Iterator[str]:
    """Yield the targets of this process's open files."""
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own
            yield os.readlink(f"/proc/self/fd/{file}")


def test_nccl_refuses_two_members_on_one_gpu(store: SignedStore, nccl: type[FakeNCCL]) -> None:
    def join(member: Part | int) -> list[Bucket | int]:
        FakeNCCL.gpu.number = 0
        with SecondDevice("cuda"):
            address = GroupAddress("127.0.0.1", store.inner.port, 1, SECRET)
            return [*WeightGroup(address, member, GPU).receive()]

    with ThreadPoolExecutor(2) as executor:
        for member in [executor.submit(join, WHOLE), executor.submit(join, 0)]:
            with pytest.raises(BrokenGroupError, match="Duplicate GPU"):
                member.result(timeout=600)


def test_backend_that_does_not_support_the_device_is_rejected() -> None:
    overrides = ["actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"]
    with pytest.raises(
        ConfigError, match=r"backend=nccl does not support trainer\.device=cpu"
    ) as raised:
        uses_object_store(compose("ppo", overrides).config.actor_rollout_ref.rollout, "cpu")
    assert "auto, object_store or gloo" in str(raised.value)


def test_a_process_without_proc_uses_gloo(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(shared_memory.os, "readlink", refuse)
    with ThreadPoolExecutor(1) as executor:
        address = GroupAddress("127.0.0.1", store.inner.port, 1, SECRET)
        engine = executor.submit(receive, address, 0, CPU)
        group = WeightGroup(address, WHOLE, CPU)
        assert group.shared is None
        for bucket in part_of(0, "cpu"):
            group.send(bucket, WHOLE)
        group.send(7, WHOLE)
        buckets, version = engine.result(timeout=600)
    assert version == 7
    assert len(buckets) == len([*part_of(0, "cpu")])
