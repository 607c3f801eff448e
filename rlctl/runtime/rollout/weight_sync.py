"""Weight sync to engines in other processes: buckets of parameters with checksums.

Each rank of a sharded trainer sends its rows of every parameter, which the engine joins, so
no rank gathers a parameter, and an engine receives each byte of the model once.
"""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes import schema
from rlctl.runtime.rollout.engine_weights import Selection
from rlctl.runtime.rollout.page_sums import PageSums, copy_values

T = TypeVar("T", covariant=True)  # result of a channel
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]  # (N,)


@dataclass(frozen=True)
class Part:
    """Rows of every parameter that one rank holds: the `index`-th of `count` parts."""

    index: int
    count: int


WHOLE = Part(0, 1)


@dataclass(frozen=True)
class Entry:
    """A parameter in a bucket, or one rank's rows of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_padded(self) -> int:
        """Size in a bucket, where each parameter begins at a multiple of 16 bytes."""
        return -(-self.num_bytes // 16) * 16


@dataclass(frozen=True)
class BucketHeader:
    """Bucket without its bytes, with their checksum at the sender."""

    number: int
    part: Part
    entries: tuple[Entry, ...]
    checksum: int = 0

    def to_json(self) -> bytes:
        """Return the header as JSON."""
        entries = [(entry.name, str(entry.dtype), entry.shape) for entry in self.entries]
        part = (self.part.index, self.part.count)
        return json.dumps([self.number, part, entries, self.checksum]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what `to_json` returns."""
        number, part, entries, checksum = json.loads(text)
        read = tuple(
            Entry(name, getattr(torch, dtype.removeprefix("torch.")), tuple(shape))
            for name, dtype, shape in entries
        )
        return cls(number, Part(*part), read, checksum)


# Returns uninitialized bytes (N,) uint8 for a bucket of a part.
Allocate = Callable[[int, Part], Tensor]


def memory_of(device: str) -> Allocate:
    """Return an `Allocate` that takes new memory on `device`."""
    return lambda size, _: torch.empty(size, dtype=torch.uint8, device=device)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that are sent together, in one array of bytes."""

    header: BucketHeader
    data: Tensor  # (N,) uint8

    @classmethod
    def from_tensors(
        cls,
        number: int,
        tensors: Sequence[tuple[str, Tensor]],
        dtype: torch.dtype,
        part: Part = WHOLE,
        allocate: Allocate = memory_of("cpu"),
        kept: Container[str] = (),
    ) -> Self:
        """Copy tensors (N, ...) to bucket `number`: see `to_buckets`."""
        dtypes = [
            dtype if value.is_floating_point() and name not in kept else value.dtype
            for name, value in tensors
        ]
        entries = tuple(
            Entry(name, sent, tuple(value.shape))
            for (name, value), sent in zip(tensors, dtypes, strict=True)
        )
        size = sum(entry.num_padded for entry in entries)
        bucket = cls(BucketHeader(number, part, entries), allocate(size, part))
        start = 0
        sums = PageSums(bucket.data)
        for entry, (_, place), (_, value) in zip(entries, bucket.tensors(), tensors, strict=True):
            copy_values(place, value, lambda size, start=start: sums.add(start + size))
            end = start + entry.num_bytes
            start += entry.num_padded
            if end < start:
                bucket.data[end:start] = 0
        header = replace(bucket.header, checksum=sums.checksum(_crc(bucket.header)))
        return cls(header, bucket.data)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values (N, ...) of the parameters, which are views of the bytes."""
        start = 0
        for entry in self.header.entries:
            data = self.data[start : start + entry.num_bytes]
            yield entry.name, data.view(entry.dtype).reshape(entry.shape)
            start += entry.num_padded

    def verify(self) -> None:
        """Recompute the checksum; raise RlctlError if it differs from the sender's."""
        header = self.header
        found = PageSums(self.data).checksum(_crc(header))
        if found != header.checksum:
            raise RlctlError(
                f"weights were corrupted in transit: bucket {header.number} was sent with checksum "
                f"{header.checksum:08x} and arrived with {found:08x}",
                where=f"{header.entries[0].name} to {header.entries[-1].name}",
                hint="check the machine for faulty memory, then resume from the latest checkpoint",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.header, self.data.numpy())


def _crc(header: BucketHeader) -> int:
    """Return a CRC-32 of names, dtypes and shapes."""
    return zlib.crc32(repr(header.entries).encode())


def _unpickled(header: BucketHeader, data: _Bytes) -> Bucket:
    return Bucket(header, read_only(data))


def read_only(data: _Bytes) -> Tensor:
    """Return bytes (N,) of memory that nobody may write to."""
    if not data.size:  # torch refuses the strides of an empty array
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # engines only read them
        return torch.from_numpy(data)


@dataclass
class Joined:
    """Buckets of all parts, by number, until each is complete."""

    open: dict[int, list[Bucket]] = field(default_factory=dict)

    def add(self, bucket: Bucket) -> list[tuple[str, Tensor]] | None:
        """Return the whole parameters (N, ...) of the bucket's number if this was its last part."""
        number = bucket.header.number
        parts = self.open.setdefault(number, [])
        parts.append(bucket)
        if len(parts) < bucket.header.part.count:
            return None
        parts = sorted(self.open.pop(number), key=lambda bucket: bucket.header.part.index)
        return [
            (rows[0][0], _join([value for _, value in rows]))
            for rows in zip(*(bucket.tensors() for bucket in parts), strict=True)
        ]


def join_buckets(buckets: Iterable[Bucket], device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield whole parameters (N, ...) on `device` as soon as all parts of their bucket have come.

    Raises RlctlError for a bucket that is corrupted or incomplete.
    """
    joined = Joined()
    for bucket in buckets:
        bucket.verify()
        for name, value in joined.add(bucket) or ():
            yield name, value.to(device)
    if joined.open:
        raise RlctlError(f"{len(joined.open)} buckets of weights have arrived in part only")


def _join(parts: list[Tensor]) -> Tensor:
    """Join the rows (M, ...) of a parameter."""
    filled = [rows for rows in parts if rows.numel()] or parts[:1]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


class WeightChannel(Protocol[T]):
    """Transport of buckets to engines, used by every rank that sends a part.

    All ranks send the same number of buckets.
    """

    device: str  # on which buckets must be
    selection: Selection  # parameters that the receivers lack

    def allocate(self, size: int, part: Part, /) -> Tensor:
        """Return uninitialized bytes (N,) for the next bucket."""
        ...

    def send(self, bucket: Bucket, /) -> None:
        """Send a bucket; return once the next one may be built (few are in flight)."""
        ...

    def close(self, version: int, part: Part = WHOLE) -> T:
        """Finish the weights of `version` (see `Completion`); return what the channel is for.

        Each rank closes it, with its part.
        """
        ...


def uses_object_store(rollout: schema.Rollout, device: str) -> bool:
    """Return True if buckets go through Ray's object store, False if in a group of processes.

    Raises ConfigError if the configured backend does not support `device` ("cpu" or "cuda").
    """
    backend = rollout.checkpoint_engine.backend
    fitting = "nccl" if device == "cuda" else "gloo"
    if backend not in ("auto", "object_store", fitting):
        key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
        raise ConfigError(
            f"{key}={backend} does not support trainer.device={device}",
            hint=f"use auto, object_store or {fitting}",
        )
    return backend == "object_store"


def bucket_bytes(rollout: schema.Rollout, device: str) -> int:
    """Return the largest size of a bucket on `device`: by default 1 GiB on GPUs, 32 MiB on CPUs."""
    megabytes = rollout.checkpoint_engine.update_weights_bucket_megabytes
    return 2**20 * (megabytes or (1024 if device.startswith("cuda") else 32))


def whole(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, int]]:
    """Yield full parameters (N, ...) with their number of elements: rows for `to_buckets`."""
    return ((name, value, value.numel()) for name, value in parameters)


def to_buckets(
    rows: Iterable[tuple[str, Tensor, int]],
    part: Part,
    dtype: torch.dtype,
    max_bytes: int,
    allocate: Allocate = memory_of("cpu"),
    kept: Container[str] = (),
) -> Iterator[Bucket]:
    """Group this rank's rows (M, ...) of parameters into the buckets that all ranks form.

    Each comes with the number of elements of the whole parameter. A joined bucket has up to
    `max_bytes`, or one larger parameter. Its floating-point values are in `dtype`, or keep their
    dtype if the name is in `kept`.
    """
    number = 0
    held = []
    size = 0
    for name, value, num_elements in rows:
        converts = value.is_floating_point() and name not in kept
        num_bytes = num_elements * (dtype if converts else value.dtype).itemsize
        if held and size + num_bytes > max_bytes:
            yield Bucket.from_tensors(number, held, dtype, part, allocate, kept)
            number += 1
            held = []
            size = 0
        held.append((name, value))
        size += num_bytes
    if held:
        yield Bucket.from_tensors(number, held, dtype, part, allocate, kept)
