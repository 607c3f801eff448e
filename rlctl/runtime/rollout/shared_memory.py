"""Buckets in memory that the processes of one machine share.

A sender builds a bucket in a slot, where engines read it while the sender builds the next ones in
other slots. A slot is free again once no engine has a tensor in it. Files of other processes are
opened through /proc, which the system allows to processes of the same user.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import count
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.runtime.rollout.weight_sync import Bucket, BucketHeader, Part, read_only

_AHEAD = 2  # buckets that are sent while engines are still busy with an earlier one
_NUM_SLOTS = 6 + _AHEAD  # in which engines may keep tensors; they copy the buckets of later slots
_RECORD = struct.Struct("5q")
_LOOK_MS = 200  # between two looks at whether another member was lost
_END = -1  # in place of a header's size


class SharedMemory:
    """Member of a group whose processes are on one machine: the sender of a part, or an engine.

    Each member has a pipe, in which the others write records of integers.
    """

    def __init__(self, member: Part | int) -> None:
        """Prepare memory and a pipe of the sender of a part, or of the engine of a number.

        Raises AttributeError or OSError where the system has no anonymous files.
        """
        self.sends = isinstance(member, Part)
        self.number = member.index if isinstance(member, Part) else member
        self._files: list[int] = []  # to close
        self._outboxes: list[int] = []
        self._heard: list[deque[tuple[int, ...]]] = []  # of each of the others
        self._slots: _Slots | None = None
        self._sent = deque([0])  # slots of messages that engines may still read
        self._used = 0  # bits of slots in which engines have tensors
        self._reader: _Reader | None = None
        self._files += os.pipe()
        self._inbox, write_end = self._files
        memory = write_end
        if self.sends:
            self._slots = _Slots()
            memory = self._slots.files[0]
        self.address = json.dumps([_address(memory), _address(write_end)])

    def connect(self, others: Sequence[str]) -> bool:
        """Open the `address` of all engines, or of all senders; return False if one is not here."""
        try:
            addresses = [json.loads(address) for address in others]
            if self._slots is None:
                self._reader = _Reader([memory for memory, _ in addresses])
            pipes = [pipe for _, pipe in addresses]
            for pid, file, name in pipes:
                self._outboxes.append(_open(pid, file, name, os.O_WRONLY))
                self._files.append(self._outboxes[-1])
        except (OSError, ValueError):  # of another machine, which may have no address
            return False
        self._heard = [deque[tuple[int, ...]]() for _ in others]
        return True

    def allocate(self, size: int) -> Tensor:
        """Return the bytes (N,) of the slot for the next bucket."""
        assert self._slots is not None
        return self._slots.memory(size)

    def send(self, message: Bucket | int, wait: Callable[[int], None]) -> None:
        """Send a bucket, or the version; return once engines are done with all but the last few.

        After the version they are done with all. `wait` waits until a file can be read, at most.
        Raises OSError if an engine has ended.
        """
        assert self._slots is not None
        ahead = 0
        if isinstance(message, Bucket):
            header = message.header.to_json()
            file, slot = self._slots.put(message.data, header)
            self._tell(len(header), len(message.data), file, slot)
            ahead = _AHEAD
        else:
            self._tell(_END, message)
        self._sent.append(self._slots.number)
        while len(self._sent) > ahead + 1:
            self._used = reduce(or_, (used for used, *_ in self._hear(wait)))
            self._sent.popleft()
        self._slots.advance(reduce(or_, (1 << slot for slot in self._sent), self._used))

    def receive(self, wait: Callable[[int], None]) -> Iterator[Bucket | int]:
        """Yield what each part sends next: see `send`."""
        assert self._reader is not None
        self._tell(self._reader.used)
        for part, (header_size, size, *place) in enumerate(self._hear(wait)):
            if header_size == _END:
                yield size
            else:
                yield self._reader.read(part, place, (header_size, size))

    def close(self) -> None:
        """Release the memory, except that of tensors."""
        for memory in (self._slots, self._reader):
            if memory is not None:
                memory.close()
        while self._files:
            os.close(self._files.pop())

    def __del__(self) -> None:
        """Close the files of a group that could not be formed."""
        self.close()

    def _tell(self, *values: int) -> None:
        record = _RECORD.pack(self.number, *values, *[0] * (4 - len(values)))
        for outbox in self._outboxes:
            os.write(outbox, record)

    def _hear(self, wait: Callable[[int], None]) -> list[tuple[int, ...]]:
        """Return the next record of each of the others, of which some may be ahead."""
        while not all(self._heard):
            wait(self._inbox)
            number, *record = _RECORD.unpack(os.read(self._inbox, _RECORD.size))
            self._heard[number].append(tuple(record))
        return [records.popleft() for records in self._heard]


def can_read(file: int) -> bool:
    """Wait for a moment until a pipe has a record; return whether it has one."""
    poll = select.poll()  # select takes no files above 1023
    poll.register(file, select.POLLIN)
    return bool(poll.poll(_LOOK_MS))


class _Slots:
    """Slots of a sender. All senders of a group use the slot of the same number."""

    def __init__(self) -> None:
        self._name = f"rlctl-{secrets.token_hex(8)}"
        self.files: list[int] = []
        self._memory: list[Tensor] = []  # (N,) uint8
        self._enter(0)

    def memory(self, size: int) -> Tensor:
        """Return the first bytes (N,) of the current slot."""
        if len(self._memory[self.number]) < size:
            file = self.files[self.number]
            os.ftruncate(file, size)
            mapped = mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._memory[self.number] = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._memory[self.number][:size]

    def put(self, data: Tensor, header: bytes) -> tuple[int, int]:
        """Complete the slot with bytes (N,) and a header; return its file and its number."""
        place = self.memory(len(data))
        file = self.files[self.number]
        if place.data_ptr() != data.data_ptr():
            place.copy_(data)
        os.pwrite(file, header, len(data))
        return file, self.number

    def advance(self, used: int) -> None:
        """Go to the first slot whose bit is not set in `used`."""
        self._enter(next(number for number in count() if not used >> number & 1))

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())

    def _enter(self, number: int) -> None:
        self.number = number
        if number == len(self.files):
            self.files.append(os.memfd_create(self._name))
            self._memory.append(torch.empty(0, dtype=torch.uint8))


class _Reader:
    """Slots of all senders in an engine's process."""

    def __init__(self, senders: Sequence[Sequence[Any]]) -> None:
        """Take the address of a slot of each sender. Raises OSError if one cannot be opened."""
        self._senders = senders
        self._slots: dict[tuple[int, int], _MappedSlot] = {}  # by sender and number
        for address in senders:
            os.close(_open(*address))

    @property
    def used(self) -> int:
        """Bits of the slots in which this process has a tensor."""
        used = {number for (_, number), slot in self._slots.items() if slot.is_used}
        return sum(1 << number for number in used)

    def read(self, sender: int, place: Sequence[int], sizes: tuple[int, int]) -> Bucket:
        """Return the bucket at a place, a file and a number, by the sizes of header and data."""
        file, number = place
        pid, _, name = self._senders[sender]
        slot = self._slots.get((sender, number))
        if slot is None:
            slot = self._slots[sender, number] = _MappedSlot(_open(pid, file, name))
        header = BucketHeader.from_json(os.pread(slot.file, *sizes))
        data = slot.read(sizes[1])
        return Bucket(header, data.clone() if number >= _NUM_SLOTS else data)

    def close(self) -> None:
        for slot in self._slots.values():
            os.close(slot.file)
        self._slots.clear()


class _MappedSlot:
    def __init__(self, file: int) -> None:
        self.file = file
        self._memory: mmap.mmap | None = None
        self._array: weakref.ref[Any] | None = None  # that all tensors in the slot refer to

    @property
    def is_used(self) -> bool:
        return self._array is not None and self._array() is not None

    def read(self, size: int) -> Tensor:
        """Return the first bytes (N,)."""
        if size and (self._memory is None or len(self._memory) < size):
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = mmap.mmap(self.file, size, flags, mmap.PROT_READ)
        array = np.frombuffer(self._memory or b"", np.uint8, size)
        self._array = weakref.ref(array)
        return read_only(array)


def _address(file: int) -> tuple[int, int, str]:
    return os.getpid(), file, os.readlink(f"/proc/self/fd/{file}")


def _open(pid: int, file: int, name: str, mode: int = os.O_RDONLY) -> int:
    """Open a file of another process by its address. Raises OSError if there is another file."""
    path = f"/proc/{pid}/fd/{file}"
    if os.readlink(path) != name:
        raise FileNotFoundError(f"{path} is not {name}")
    return os.open(path, mode)
