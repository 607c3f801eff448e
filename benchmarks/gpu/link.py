"""Rung of weight sync: the link between two processes, each with a GPU if the machine has two.

NCCL refuses two ranks on one GPU: then the reason is noted, and nothing is measured.
"""

from __future__ import annotations

import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.gpu.machine import synchronize
from benchmarks.gpu.recorder import Recorder, Settings, reason
from benchmarks.gpu.work import rank_info
from rlctl.runtime.cluster.link import Link
from rlctl.runtime.rollout.weight_sync import WHOLE, BucketHeader, to_buckets, whole

_HOST = "127.0.0.1"
_REPLY_S = 90.0


def measure(settings: Settings, recorder: Recorder) -> None:
    """Send buckets of weights to a second process, and compare what it received."""
    megabytes = 8 if settings.tiny else 1024
    ours, theirs = get_context("spawn").Pipe()
    listener = Link.listen(_HOST)
    arguments = (theirs, listener.port, settings.device)
    engine = get_context("spawn").Process(target=_receive, args=arguments, daemon=True)
    engine.start()
    try:
        alone = settings.device == "cuda" and torch.cuda.device_count() == 1
        with recorder.attempt(f"link on {settings.device}", optional=alone):
            _send(listener, ours, settings, recorder, megabytes)
    finally:
        engine.kill()
        engine.join()


def _send(
    listener: TCPStore, pipe: Connection, settings: Settings, recorder: Recorder, megabytes: int
) -> None:
    if settings.device == "cuda":
        torch.cuda.set_device(0)
    link = Link.to_engine(listener, rank_info(settings.device))
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(megabytes * 2**18, generator=draw).to(settings.device)
    parameters = [(str(number), part) for number, part in enumerate(values.chunk(64))]
    times = []
    for _ in range(2):
        synchronize(settings.device)
        begin = time.perf_counter()
        buckets = to_buckets(whole(parameters), WHOLE, torch.float32, 32 * 2**20, settings.device)
        for bucket in buckets:
            pipe.send(bucket.header)
            link.send(bucket)
            _expect(pipe)
        times.append(time.perf_counter() - begin)
    pipe.send(None)
    recorder.row(
        "link",
        backend="nccl" if settings.device == "cuda" else "gloo",
        megabytes=megabytes,
        first_s=times[0],
        second_s=times[1],
        gb_per_s=megabytes * 2**20 / times[1] / 1e9,
        ok=True,  # the other process verifies the checksum of each bucket
    )


def _expect(pipe: Connection) -> None:
    """Wait for the reply of the other process. Raises RuntimeError for its error."""
    if not pipe.poll(_REPLY_S):
        raise RuntimeError(f"the other process has not replied within {_REPLY_S:.0f} s")
    reply = pipe.recv()
    if reply is not None:
        raise RuntimeError(reply)


def _receive(pipe: Connection, port: int, device: str) -> None:
    """Receive buckets until None, verify them, and reply to each."""
    try:
        if device == "cuda":
            torch.cuda.set_device(torch.cuda.device_count() - 1)
        link = Link.to_trainer(_HOST, port, rank_info(device))
        while (header := pipe.recv()) is not None:
            assert isinstance(header, BucketHeader)
            link.fetch(header).verify()
            pipe.send(None)
    except Exception as error:
        pipe.send(reason(error))
