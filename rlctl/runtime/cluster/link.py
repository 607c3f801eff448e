"""A link from the trainer's first rank to one engine, by which tensors go from device to device: NCCL between GPUs, gloo between CPUs.

Each engine has a link of its own, not a group with all others: one that dies in the middle of a transfer breaks its own link, and nobody
else waits for it. Over gloo links are tested; **over NCCL they have not been run.**
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.weight_sync import Bucket, BucketHeader

_TRAINER, _ENGINE = 0, 1
_CONNECT_S = 60.0  # in which the other side must come


class Link:
    """One end. Both ends are made at the same time; a link that lost its other end is closed and replaced by another."""

    def __init__(self, store: TCPStore, rank: int, rank_info: RankInfo) -> None:
        self.store = store
        self.device = rank_info.device
        self._block: Bucket | None = (
            None  # what is sent, and the work of sending it, must live until it has arrived
        )
        self._sending: list[dist.Work] = []
        timeout = timedelta(seconds=rank_info.timeout_s)
        self.group: Any  # torch's types know no send and recv of theirs
        if rank_info.device == "cuda":
            with _errors_end_no_process():
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self.group = dist.ProcessGroupNCCL(store, rank, 2, options)
        else:
            self.group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=_CONNECT_S))
            self.group.set_timeout(timeout)

    @staticmethod
    def listen(host: str) -> TCPStore:
        """Where the engine will find the trainer: at `host` and the store's port, which the kernel says is free."""
        return TCPStore(
            host,
            0,
            2,
            is_master=True,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
        )

    @classmethod
    def to_engine(cls, door: TCPStore, rank_info: RankInfo) -> Self:
        """The trainer's end. Raises `RuntimeError` if the engine does not come within a minute."""
        return cls(door, _TRAINER, rank_info)

    @classmethod
    def to_trainer(cls, host: str, port: int, rank_info: RankInfo) -> Self:
        """The engine's end."""
        timeout = timedelta(seconds=_CONNECT_S)
        return cls(
            TCPStore(host, port, 2, is_master=False, timeout=timeout, wait_for_workers=False),
            _ENGINE,
            rank_info,
        )

    def send(self, block: Bucket) -> None:
        """Begin to send the bytes. The engine must have said that it has the block before."""
        self._block = block
        self._sending = [
            self.group.send([each.data], _ENGINE, 0)
            for each in block.parameters
            if each.data.nbytes
        ]

    def fetch(self, header: BucketHeader) -> Bucket:
        """The block that the trainer has announced and sends."""
        block = header.empty(self.device)
        for parameter in block.parameters:
            if parameter.data.nbytes:
                self.group.recv([parameter.data], _TRAINER, 0).wait()
        return block

    def close(self) -> None:
        """Break off whatever is on its way."""
        self.group.abort()
        self._sending, self._block = [], None


@contextmanager
def _errors_end_no_process() -> Iterator[None]:
    """For what is made inside: torch's watchdog of NCCL leaves the trainer alive when an engine is lost."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
