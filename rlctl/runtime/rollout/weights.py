"""Weights on their way to engines in other processes: blocks of whole parameters, each with a checksum that the receiver compares.

A block holds numpy arrays, which cross process borders without a copy where the transport allows it (Ray's object store does).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from rlctl.errors import RlctlError

# Parameters travel together up to so many bytes; a larger one travels alone. More is no quicker and takes memory.
BLOCK_BYTES = 32 * 2**20
_WIDTH = 1024  # columns of the matrix whose sums are the checksum


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter: its bytes (N,) uint8, and what they mean."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]

    @classmethod
    def of(cls, name: str, value: Tensor, dtype: torch.dtype) -> Self:
        """`value` as `dtype` (where it is a number with a fraction) on the CPU; not copied where it is so already."""
        value = value.to(device="cpu", dtype=dtype if value.is_floating_point() else None).contiguous()
        return cls(name, value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy())

    def tensor(self) -> Tensor:
        """The parameter, not copied: valid as long as the block."""
        if not self.data.size:  # torch sees no stride in an array without elements
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(self.data).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Block:
    """Some parameters, and the checksum that they had when they were sent."""

    number: int
    parameters: tuple[Parameter, ...]
    checksum: int

    @classmethod
    def of(cls, number: int, parameters: Iterable[Parameter]) -> Self:
        parameters = tuple(parameters)
        return cls(number, parameters, _checksum(parameters))

    def verify(self) -> None:
        """Raises `RlctlError` if what arrived is not what was sent."""
        found = _checksum(self.parameters)
        if found != self.checksum:
            raise RlctlError(
                f"weights arrived damaged: block {self.number} was sent with checksum {self.checksum:08x} and has {found:08x}",
                where=f"{self.parameters[0].name} to {self.parameters[-1].name}",
                hint="answers under wrong weights would spoil the run, so it stops; look for faulty memory, or go on from a checkpoint",
            )


class WeightChannel(Protocol):
    """Where the trainer's first rank sends blocks; the others may hold it and must not use it."""

    def send(self, block: Block) -> None:
        """Returns when another block may be made: few are on their way at a time."""
        ...

    def close(self) -> dict[int, str]:
        """All have been sent. The engines that were lost on the way, by number, with the reason."""
        ...


def to_blocks(parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Cut a stream of parameters into blocks. At no moment more than one block and one parameter are held."""
    number, held, size = 0, [], 0
    for name, value in parameters:
        parameter = Parameter.of(name, value, dtype)
        if held and size + parameter.data.nbytes > max_bytes:
            yield Block.of(number, held)
            number, held, size = number + 1, [], 0
        held.append(parameter)
        size += parameter.data.nbytes
    if held:
        yield Block.of(number, held)


def _checksum(parameters: Iterable[Parameter]) -> int:
    """CRC-32 of names, shapes and bytes.

    Bytes are read as a matrix of 64-bit words, whose row and column sums go into the CRC: any changed or moved word changes one of them,
    and it is several times as quick as the CRC of the bytes themselves.
    """
    crc = 0
    for each in parameters:
        crc = zlib.crc32(f"{each.name} {each.dtype} {each.shape}".encode(), crc)
        whole = each.data.nbytes // (8 * _WIDTH) * (8 * _WIDTH)
        words = torch.from_numpy(each.data[:whole].view(np.int64)).view(-1, _WIDTH)
        for part in (words.sum(0).numpy(), words.sum(1).numpy(), each.data[whole:]):
            crc = zlib.crc32(part.tobytes(), crc)
    return crc
