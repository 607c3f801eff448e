"""Weights on their way to engines in other processes: blocks of whole parameters, each with a checksum that the receiver compares.

Between GPUs a block stays on the device. On a CPU it is pickled as numpy arrays, which cross process borders without a copy where the
transport allows it (Ray's object store does).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes import schema

_WIDTH = 1024  # columns of the matrix whose sums are the checksum


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter: its bytes (N,) uint8, and what they mean."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: Tensor

    @classmethod
    def from_tensor(cls, name: str, value: Tensor, dtype: torch.dtype, device: str) -> Self:
        """`value` as `dtype` (where it is a number with a fraction) on `device`; not copied where it is so already."""
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
        """For a parameter that has yet to arrive."""
        return cls(
            name,
            dtype,
            shape,
            torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device),
        )

    def tensor(self) -> Tensor:
        """The parameter, not copied: valid as long as the block."""
        return self.data.view(self.dtype).reshape(self.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.name, self.dtype, self.shape, self.data.numpy())


def _unpickled(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray[Any, np.dtype[np.uint8]]
) -> Parameter:
    # torch sees no stride in an array without elements
    return Parameter(
        name,
        dtype,
        shape,
        torch.from_numpy(data) if data.size else torch.empty(0, dtype=torch.uint8),
    )


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some parameters, and the checksum that they had when they were sent."""

    number: int
    parameters: tuple[Parameter, ...]
    checksum: int

    @classmethod
    def from_parameters(cls, number: int, parameters: Iterable[Parameter]) -> Self:
        parameters = tuple(parameters)
        return cls(number, parameters, _checksum(parameters))

    def header(self) -> BucketHeader:
        """All but the bytes."""
        return BucketHeader(
            self.number,
            tuple((each.name, each.dtype, each.shape) for each in self.parameters),
            self.checksum,
        )

    def verify(self) -> None:
        """Raises `RlctlError` if what arrived is not what was sent."""
        found = _checksum(self.parameters)
        if found != self.checksum:
            raise RlctlError(
                f"weights arrived damaged: block {self.number} was sent with checksum {self.checksum:08x} and has {found:08x}",
                where=f"{self.parameters[0].name} to {self.parameters[-1].name}",
                hint="answers under wrong weights would spoil the run, so it stops; look for faulty memory, or go on from a checkpoint",
            )


@dataclass(frozen=True)
class BucketHeader:
    """A block whose bytes come another way."""

    number: int
    parameters: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    checksum: int

    def empty(self, device: str) -> Bucket:
        """The block, with room for its bytes on `device`."""
        return Bucket(
            self.number,
            tuple(Parameter.empty(*each, device) for each in self.parameters),
            self.checksum,
        )


class WeightChannel(Protocol):
    """Where the trainer's first rank sends blocks; the others may hold it and must not use it."""

    device: str  # where it takes them

    def send(self, block: Bucket) -> None:
        """Returns when another block may be made: few are on their way at a time."""
        ...

    def close(self) -> dict[int, str]:
        """All have been sent. The engines that were lost on the way, by number, with the reason."""
        ...


def uses_host_memory(rollout: schema.Rollout, device: str) -> bool:
    """Whether blocks go through the host's memory, as is right on a CPU, or from device to device.

    Raises `ConfigError` where they cannot go the way that the configuration names.
    """
    backend, own = rollout.checkpoint_engine.backend, "nccl" if device == "cuda" else "gloo"
    if backend not in ("auto", "object_store", own):
        key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
        raise ConfigError(
            f"{key}={backend} does not carry tensors of trainer.device={device}",
            hint=f"auto, object_store or {own}",
        )
    return backend == "object_store" or (backend == "auto" and device == "cpu")


def to_buckets(
    parameters: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    max_bytes: int,
    device: str = "cpu",
) -> Iterator[Bucket]:
    """Cut a stream of parameters into blocks of up to `max_bytes`, or one larger parameter, on `device`.

    At no moment more than one block and one parameter are held.
    """
    number, held, size = 0, [], 0
    for name, value in parameters:
        parameter = Parameter.from_tensor(name, value, dtype, device)
        if held and size + parameter.data.nbytes > max_bytes:
            yield Bucket.from_parameters(number, held)
            number, held, size = number + 1, [], 0
        held.append(parameter)
        size += parameter.data.nbytes
    if held:
        yield Bucket.from_parameters(number, held)


def _checksum(parameters: Iterable[Parameter]) -> int:
    """CRC-32 of names, shapes and bytes.

    Bytes are read as a matrix of 64-bit words, whose row and column sums, made on the device, go into the CRC: any changed or moved word
    changes one of them, and it is several times as quick as the CRC of the bytes themselves.
    """
    crc = 0
    for each in parameters:
        crc = zlib.crc32(f"{each.name} {each.dtype} {each.shape}".encode(), crc)
        whole = each.data.nbytes // (8 * _WIDTH) * (8 * _WIDTH)
        words = each.data[:whole].view(torch.int64).view(-1, _WIDTH)
        for part in (words.sum(0), words.sum(1), each.data[whole:]):
            crc = zlib.crc32(part.cpu().numpy().tobytes(), crc)
    return crc
