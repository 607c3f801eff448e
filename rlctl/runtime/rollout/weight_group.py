"""Process group of the trainer's ranks and the engines: NCCL between GPUs, gloo between CPUs.

Each rank that has a part of the weights broadcasts its part of a bucket, one after the other, so
that all engines receive at once; their sizes are exchanged in one call before. A group lasts until
one of its members is lost; all others then leave it, and the next weight sync forms another one. It
is tested with gloo; **it has not been run with NCCL.** On the CPUs of one machine, buckets are in
shared memory instead.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.rollout.rendezvous import use_interface_to
from rlctl.runtime.rollout.shared_memory import SharedMemory, can_read
from rlctl.runtime.rollout.weight_changes import WeightChanges
from rlctl.runtime.rollout.weight_sync import Bucket, BucketHeader, Part

CONNECT_S = 60.0  # deadline for all members to connect
CHECK_S = 0.2  # between two looks at whether a member was lost
# Pauses before looks at whether a broadcast is over; the last one repeats.
POLLS_S = (2e-5, 5e-5, *(1e-4,) * 4, *(2e-4,) * 4, 5e-4, 1e-3)
# Keys of the store.
BROKEN = "broken"
ONLY_CHANGES = "only-changes"  # exists if only changed values are sent
_NUM_PARTS = "num-parts"
_END = -1  # in place of a header's size


class BrokenGroupError(RuntimeError):
    """A member was lost, or took too long."""


@dataclass(frozen=True)
class GroupAddress:
    """Store in the driver's process where the members of a group find each other."""

    host: str
    port: int
    num_receivers: int
    secret: str = field(repr=False)


class WeightGroup:
    """Membership of this process in a group; ranks are the parts and then the receivers."""

    def __init__(self, address: GroupAddress, member: Part | int, rank_info: RankInfo) -> None:
        """Connect to the other members as the sender of a part, or as the receiver of a number.

        Raises BrokenGroupError if they do not connect within a minute, or the rank's deadline.
        """
        from rlctl.runtime.rollout.signed_store import SignedStore, connect_store

        self.address = address
        self.device = rank_info.device
        self.timeout_s = rank_info.timeout_s
        self._connect_s = min(CONNECT_S, self.timeout_s)
        try:
            use_interface_to(address.host)
            limit = timedelta(seconds=self._connect_s)
            num_members = address.num_receivers + 1
            store = connect_store(address.host, address.port, num_members, limit)
            self.store = SignedStore(store, address.secret)
            if isinstance(member, Part):
                self.store.set(_NUM_PARTS, str(member.count))
            self.num_parts = int(self.store.get(_NUM_PARTS))
            self.size = self.num_parts + address.num_receivers
            rank = member.index if isinstance(member, Part) else self.num_parts + member
            self.shared = self._shared_memory(member, rank)
            self.group: Any = None if self.shared else self._connected(rank)
            self.changes = WeightChanges() if self.store.has(ONLY_CHANGES) else None
        except RuntimeError as error:  # torch raises it for stores, sockets and NCCL alike
            raise BrokenGroupError(f"no group could be formed: {error}") from error

    def _shared_memory(self, member: Part | int, rank: int) -> SharedMemory | None:
        """Return the memory of this machine's processes if all members are among them."""
        shared = None
        address = ""
        if self.device == "cpu":
            with suppress(AttributeError, OSError):  # no anonymous files, or no /proc
                shared = SharedMemory(member)
                address = shared.address
        addresses = self._tell("address", rank, address)
        others = addresses[: self.num_parts]
        if isinstance(member, Part):
            others = addresses[self.num_parts :]
        opened = "yes" if shared is not None and shared.connect(others) else ""
        if not all(self._tell("opened", rank, opened)) and shared:
            shared.close()
            return None
        return shared

    def _tell(self, key: str, rank: int, value: str) -> list[str]:
        """Store a value of this member; return those of all members, by rank."""
        # Neither backend looks for a lost member while it connects.
        self.store.set(f"{key}-{rank}", value)
        keys = [f"{key}-{other}" for other in range(self.size)]
        deadline = time.monotonic() + self._connect_s
        while not self.store.check(keys):
            self._check_members(deadline)
            time.sleep(1e-2)
        return [self.store.get(other).decode() for other in keys]

    def _connected(self, rank: int) -> Any:  # torch's stubs lack `broadcast`
        timeout = timedelta(seconds=self.timeout_s)
        size = self.size
        if self.device != "cuda":
            connect = timedelta(seconds=self._connect_s)
            group: Any = dist.ProcessGroupGloo(self.store, rank, size, connect)
            group.set_timeout(timeout)
            return group
        with _no_nccl_abort():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            # Its threads use the store, and must not wait for Python.
            return dist.ProcessGroupNCCL(self.store.inner, rank, size, options)

    def allocate(self, size: int) -> Tensor:
        """Return uninitialized bytes (N,) for the next bucket that this member sends."""
        return self.shared.allocate(size) if self.shared else self._empty(size)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def send(self, message: Bucket | int, part: Part) -> int:
        """Broadcast a bucket, or the version at the end, when it is the turn of `part`.

        Takes part in the broadcasts of the other parts. Returns the bytes sent, without headers.
        Raises BrokenGroupError.
        """
        data = message.data if isinstance(message, Bucket) else None
        if self.shared:
            with self._closing():
                self.shared.send(message, self._wait_for)
        else:
            if self.changes is not None and isinstance(message, Bucket):
                data = self.changes.encode(message)
                message = Bucket(message.header, data)
            deque(self._take_turns(message, part.index), maxlen=0)
        return 0 if data is None else len(data)

    def receive(self) -> Iterator[Bucket | int]:
        """Yield what each part sends in this turn. Raises BrokenGroupError."""
        if self.shared:
            with self._closing():
                yield from self.shared.receive(self._wait_for)
            return
        for message in self._take_turns(None, -1):
            if self.changes is not None and isinstance(message, Bucket):
                message = self.changes.decode(message.header, message.data)
            yield message

    def _take_turns(self, message: Bucket | int | None, number: int) -> Iterator[Bucket | int]:
        """Exchange the sizes of all members' messages, and yield those of the other parts."""
        header = b""
        sizes = (0, 0)
        if isinstance(message, Bucket):
            header = message.header.to_json()
            sizes = len(header), len(message.data)
        elif message is not None:
            sizes = _END, message
        every = self._gather(torch.tensor(sizes, dtype=torch.int64, device=self.device))
        for index, (header_size, data_size) in enumerate(every[: self.num_parts]):
            if header_size == _END:
                if index != number:
                    yield data_size
                continue
            if index == number:
                assert isinstance(message, Bucket)
                tail = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                self._broadcast(torch.cat([message.data, tail.to(device=self.device)]), index)
                continue
            data = self._empty(data_size + header_size)
            self._broadcast(data, index)
            text = data[data_size:].cpu().numpy().tobytes()
            yield Bucket(BucketHeader.from_json(text), data[:data_size])

    def close(self) -> None:
        """Leave the group, aborting transfers in progress, and let the others leave it, too."""
        with suppress(RuntimeError):  # the driver has closed the store
            self.store.set(BROKEN, "")
        if self.shared:
            self.shared.close()
        else:
            self.group.abort()

    def _check_members(self, deadline: float) -> None:
        if time.monotonic() > deadline or self.store.check([BROKEN]):
            raise RuntimeError("another member of the group was lost or is late")

    def _broadcast(self, data: Tensor, source: int) -> None:
        """Broadcast bytes (N,) from `source`, and wait until they have arrived here."""
        self._wait(lambda: self.group.broadcast(data, source))

    def _gather(self, sizes: Tensor) -> list[list[int]]:
        """Return the sizes (2,) of each member."""
        every = [torch.empty_like(sizes) for _ in range(self.size)]
        self._wait(lambda: self.group.allgather(every, sizes))
        return torch.stack(every).tolist()

    def _wait(self, begin: Callable[[], Any]) -> None:
        """Begin a call of the group and wait for its end. Raises BrokenGroupError."""
        pauses = iter(POLLS_S)
        checked = time.monotonic()
        deadline = checked + self.timeout_s
        with self._closing():
            work = begin()
            while not work.is_completed():
                time.sleep(next(pauses, POLLS_S[-1]))
                now = time.monotonic()
                if now > checked + CHECK_S:
                    checked = now
                    self._check_members(deadline)
            work.wait()

    def _wait_for(self, file: int) -> None:
        """Wait until a pipe of shared memory can be read."""
        deadline = time.monotonic() + self.timeout_s
        while not can_read(file):
            self._check_members(deadline)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Leave the group after errors of its transports. Raises BrokenGroupError for them."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            self.close()
            if self.group is not None and self.device != "cuda":
                # Its destructor would wait for aborted calls, as long as they may last.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
            raise BrokenGroupError(str(error)) from error


_joined: WeightGroup | None = None  # of this process


def join_group(address: GroupAddress, member: Part | int, rank_info: RankInfo) -> WeightGroup:
    """Return this process's membership in the group at `address`; it leaves another one."""
    global _joined
    if _joined is None or _joined.address != address:
        leave_group()
        _joined = WeightGroup(address, member, rank_info)
    return _joined


def leave_group() -> None:
    """Close the group of this process, if any."""
    global _joined
    group = _joined
    _joined = None
    if group is not None:
        group.close()


def receive_weights(
    address: GroupAddress, number: int, rank_info: RankInfo, load: Callable[[Broadcast], object]
) -> int | None:
    """Let `load` get the weights that the group at `address` gets, as its receiver of this number.

    Returns their version, or None if the group breaks.
    """
    try:
        group = join_group(address, number, rank_info)
        load(weights := Broadcast(group))
    except BaseException as error:
        leave_group()
        if isinstance(error, BrokenGroupError):
            return None
        raise
    return weights.version


class Broadcast:
    """Buckets that an engine receives in a group, and then the `version` of the weights."""

    def __init__(self, group: WeightGroup) -> None:
        self.group = group
        self.version = -1

    def __iter__(self) -> Iterator[Bucket]:
        while self.version < 0:  # all parts end in the same turn
            for message in self.group.receive():
                if isinstance(message, Bucket):
                    yield message
                else:
                    self.version = message


@contextmanager
def _no_nccl_abort() -> Iterator[None]:
    """Create NCCL groups whose watchdog does not abort this process when a member is lost."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
