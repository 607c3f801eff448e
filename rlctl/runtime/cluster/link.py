"""Link from the trainer's first rank to one engine: NCCL between GPUs, gloo between CPUs.

Each engine has its own two-rank process group instead of one group with all others, so that an
engine that crashes during a transfer breaks only its own link. Links are tested with gloo; **they
have not been run with NCCL.**
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
from rlctl.runtime.workers.store import connect_store, listen, open_store

_TRAINER, _ENGINE = 0, 1
_CONNECT_S = 60.0  # deadline for the other end to connect


class Link:
    """One end of a link. A link whose other end is lost must be closed and replaced."""

    def __init__(self, store: TCPStore, rank: int, rank_info: RankInfo) -> None:
        self.store = store
        self.device = rank_info.device
        self._bucket: Bucket | None = None  # kept alive, like its transfer, until it has arrived
        self._sending: dist.Work | None = None
        timeout = timedelta(seconds=rank_info.timeout_s)
        self.group: Any  # torch's stubs lack its send and recv
        if rank_info.device == "cuda":
            # NCCL connects at the first transfer, and would wait for a lost end indefinitely.
            store.set(f"end-{rank}", "")
            store.wait([f"end-{1 - rank}"], timedelta(seconds=_CONNECT_S))
            with _no_nccl_abort():
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self.group = dist.ProcessGroupNCCL(store, rank, 2, options)
        else:
            self.group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=_CONNECT_S))
            self.group.set_timeout(timeout)

    @staticmethod
    def listen(host: str) -> TCPStore:
        """Open the trainer's store at `host` and a free port, for the engine to connect to."""
        return open_store(listen(host, 2), 2, timedelta(seconds=_CONNECT_S))

    @classmethod
    def to_engine(cls, listener: TCPStore, rank_info: RankInfo) -> Self:
        """Open the trainer's end. Raises RuntimeError if no engine connects within a minute."""
        return cls(listener, _TRAINER, rank_info)

    @classmethod
    def to_trainer(cls, host: str, port: int, rank_info: RankInfo) -> Self:
        """Open the engine's end, connecting to the trainer's store at `host:port`."""
        timeout = timedelta(seconds=_CONNECT_S)
        return cls(connect_store(host, port, 2, timeout), _ENGINE, rank_info)

    def send(self, bucket: Bucket) -> None:
        """Start to send a bucket's data. The engine must have received the previous bucket."""
        self._bucket = bucket
        if bucket.data.nbytes:
            self._sending = self.group.send([bucket.data], _ENGINE, 0)

    def fetch(self, header: BucketHeader) -> Bucket:
        """Receive the bucket that `header` describes, on this end's device."""
        bucket = header.empty(self.device)
        if bucket.data.nbytes:
            self.group.recv([bucket.data], _TRAINER, 0).wait()
        return bucket

    def close(self) -> None:
        """Abort transfers in progress."""
        self.group.abort()
        self._sending = self._bucket = None


@contextmanager
def _no_nccl_abort() -> Iterator[None]:
    """Create NCCL groups whose watchdog does not abort this process when the other end is lost."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
