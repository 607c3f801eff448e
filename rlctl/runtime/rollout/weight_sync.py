"""Weight sync to engines in other processes: buckets of parameters with checksums.

Each rank of a sharded trainer sends its own rows of every parameter, which the engine joins, so
no rank gathers a parameter, and an engine receives each byte of the model once.

Between GPUs a bucket stays on the device. On a CPU it is pickled as numpy arrays, which are shared
between processes without a copy if the transport supports it (Ray's object store does).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes import schema
from rlctl.runtime.model.engine_weights import Selection

T = TypeVar("T", covariant=True)  # result of a channel

_WIDTH = 1024  # columns of the matrix whose row and column sums enter the checksum


@dataclass(frozen=True)
class Part:
    """Rows of every parameter that one rank holds: the `index`-th of `count` parts."""

    index: int
    count: int


WHOLE = Part(0, 1)


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter as bytes, with its dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: Tensor  # (N,) uint8

    @classmethod
    def from_tensor(cls, name: str, value: Tensor, dtype: torch.dtype, device: str) -> Self:
        """Convert `value` (N, ...) to `device`, and to `dtype` if it is floating-point.

        Copies only if necessary.
        """
        value = value.to(
            device=device, dtype=dtype if value.is_floating_point() else None
        ).contiguous()
        data = value.reshape(-1).view(torch.uint8)
        return cls(
            name,
            value.dtype,
            tuple(value.shape),
            data if data.storage_offset() % 8 == 0 else data.clone(),
        )

    @classmethod
    def empty(cls, name: str, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> Self:
        """Allocate a parameter to receive into."""
        return cls(
            name,
            dtype,
            shape,
            torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device),
        )

    def tensor(self) -> Tensor:
        """Return the parameter in its `shape` (N, ...) and dtype, a view of the bucket's memory."""
        return self.data.view(self.dtype).reshape(self.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.name, self.dtype, self.shape, self.data.numpy())


def _unpickled(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray[Any, np.dtype[np.uint8]]
) -> Parameter:
    # torch.from_numpy refuses the strides of an empty array.
    return Parameter(
        name,
        dtype,
        shape,
        torch.from_numpy(data) if data.size else torch.empty(0, dtype=torch.uint8),
    )


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that are sent together, with their checksum at the sender."""

    number: int
    parameters: tuple[Parameter, ...]
    checksum: int
    part: Part

    @classmethod
    def from_parameters(
        cls, number: int, parameters: Iterable[Parameter], part: Part = WHOLE
    ) -> Self:
        """Build bucket `number` of a weight sync and compute its checksum."""
        parameters = tuple(parameters)
        return cls(number, parameters, _checksum(parameters), part)

    def header(self) -> BucketHeader:
        """Return everything except the bytes."""
        return BucketHeader(
            self.number,
            tuple(
                (parameter.name, parameter.dtype, parameter.shape) for parameter in self.parameters
            ),
            self.checksum,
            self.part,
        )

    def verify(self) -> None:
        """Recompute the checksum; raise RlctlError if it differs from the sender's."""
        found = _checksum(self.parameters)
        if found != self.checksum:
            raise RlctlError(
                f"weights were corrupted in transit: bucket {self.number} was sent with checksum "
                f"{self.checksum:08x} and arrived with {found:08x}",
                where=f"{self.parameters[0].name} to {self.parameters[-1].name}",
                hint="check the machine for faulty memory, then resume from the latest checkpoint",
            )


@dataclass(frozen=True)
class BucketHeader:
    """Bucket without its bytes, which are sent separately."""

    number: int
    parameters: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    checksum: int
    part: Part

    def empty(self, device: str) -> Bucket:
        """Allocate the bucket on `device`, to receive its bytes into."""
        return Bucket(
            self.number,
            tuple(Parameter.empty(*layout, device) for layout in self.parameters),
            self.checksum,
            self.part,
        )


@dataclass
class Joined:
    """Buckets of all parts, by number, until each is complete."""

    open: dict[int, list[Bucket]] = field(default_factory=dict)

    def add(self, bucket: Bucket) -> list[Parameter] | None:
        """Return the whole parameters of the bucket's number if this was its last part."""
        parts = self.open.setdefault(bucket.number, [])
        parts.append(bucket)
        if len(parts) < bucket.part.count:
            return None
        parts = sorted(self.open.pop(bucket.number), key=lambda bucket: bucket.part.index)
        return [
            _joined(rows) for rows in zip(*(bucket.parameters for bucket in parts), strict=True)
        ]


def _joined(parts: Sequence[Parameter]) -> Parameter:
    """Join the rows of a parameter."""
    filled = [parameter for parameter in parts if parameter.data.nbytes] or parts[:1]
    first = filled[0]
    if len(filled) == 1:
        return first
    shape = (sum(parameter.shape[0] for parameter in filled), *first.shape[1:])
    return Parameter(
        first.name, first.dtype, shape, torch.cat([parameter.data for parameter in filled])
    )


class WeightChannel(Protocol[T]):
    """Transport of buckets to engines, used by every rank that sends a part."""

    device: str  # on which buckets must be
    selection: Selection  # parameters that the receivers lack

    def send(self, bucket: Bucket, /) -> None:
        """Send a bucket; return once the next one may be built (few are in flight)."""
        ...

    def close(self, version: int, num_parts: int = 1) -> T:
        """Finish the weights of `version` (see `Completion`); return what the channel is for.

        `num_parts` ranks close it.
        """
        ...


def uses_host_memory(rollout: schema.Rollout, device: str) -> bool:
    """Return True if buckets go through host memory, False if they go from device to device.

    Raises ConfigError if the configured backend does not support `device` ("cpu" or "cuda").
    """
    backend, own = rollout.checkpoint_engine.backend, "nccl" if device == "cuda" else "gloo"
    if backend not in ("auto", "object_store", own):
        key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
        raise ConfigError(
            f"{key}={backend} does not support trainer.device={device}",
            hint=f"use auto, object_store or {own}",
        )
    return backend == "object_store" or (backend == "auto" and device == "cpu")


def whole(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, int]]:
    """Yield full parameters (N, ...) with their number of elements: rows for `to_buckets`."""
    return ((name, value, value.numel()) for name, value in parameters)


def to_buckets(
    rows: Iterable[tuple[str, Tensor, int]],
    part: Part,
    dtype: torch.dtype,
    max_bytes: int,
    device: str = "cpu",
) -> Iterator[Bucket]:
    """Group this rank's rows (M, ...) of parameters into the buckets that all ranks form.

    Each comes with the number of elements of the whole parameter. A joined bucket has up to
    `max_bytes`, or one larger parameter. Rows are converted to `dtype` on `device`; at most one
    bucket and one parameter are held.
    """
    number, held, size = 0, [], 0
    for name, value, num_elements in rows:
        parameter = Parameter.from_tensor(name, value, dtype, device)
        num_bytes = num_elements * parameter.dtype.itemsize
        if held and size + num_bytes > max_bytes:
            yield Bucket.from_parameters(number, held, part)
            number, held, size = number + 1, [], 0
        held.append(parameter)
        size += num_bytes
    if held:
        yield Bucket.from_parameters(number, held, part)


def _checksum(parameters: Iterable[Parameter]) -> int:
    """Return a CRC-32 of names, dtypes, shapes and contents.

    Contents are read as a matrix (rows, 1024) of 64-bit words; its row and column sums, computed on
    the device, enter the CRC. Any changed or moved word changes one of them, and this is several
    times faster than a CRC of the bytes.
    """
    crc = 0
    for parameter in parameters:
        crc = zlib.crc32(f"{parameter.name} {parameter.dtype} {parameter.shape}".encode(), crc)
        num_bytes = parameter.data.nbytes // (8 * _WIDTH) * (8 * _WIDTH)
        words = parameter.data[:num_bytes].view(torch.int64).view(-1, _WIDTH)
        for part in (words.sum(0), words.sum(1), parameter.data[num_bytes:]):
            crc = zlib.crc32(part.cpu().numpy().tobytes(), crc)
    return crc
