"""Rung of weight sync: the link between two processes, each with a GPU if the machine has two.

NCCL refuses two ranks on one GPU: then the reason is noted, and nothing is measured.
"""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu.machine import synchronize
from benchmarks.gpu.recorder import Recorder, Settings, reason
from benchmarks.gpu.work import rank_info
from rlctl.recipes.compose import compose
from rlctl.runtime.rollout.rendezvous import listen
from rlctl.runtime.rollout.signed_store import new_secret, open_store
from rlctl.runtime.rollout.weight_group import Broadcast, GroupAddress, WeightGroup
from rlctl.runtime.rollout.weight_sync import WHOLE, bucket_bytes, to_buckets, whole

_HOST = "127.0.0.1"
_REPLY_S = 90.0


def measure(settings: Settings, recorder: Recorder) -> None:
    """Send buckets of weights to a second process, and compare what it received."""
    megabytes = 8 if settings.tiny else 1024
    ours, theirs = get_context("spawn").Pipe()
    store = open_store(listen(_HOST, 2), 2, timedelta(seconds=_REPLY_S))
    address = GroupAddress(_HOST, store.port, num_receivers=1, secret=new_secret())
    engine = get_context("spawn").Process(
        target=_receive, args=(theirs, address, settings.device), daemon=True
    )
    engine.start()
    try:
        alone = settings.device == "cuda" and torch.cuda.device_count() == 1
        with recorder.attempt(f"link on {settings.device}", optional=alone):
            _send(address, ours, settings, recorder, megabytes)
    finally:
        engine.kill()
        engine.join()


def _send(
    address: GroupAddress, pipe: Connection, settings: Settings, recorder: Recorder, megabytes: int
) -> None:
    if settings.device == "cuda":
        torch.cuda.set_device(0)
    group = WeightGroup(address, WHOLE, rank_info(settings.device))
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(megabytes * 2**18, generator=draw).to(settings.device)
    parameters = [(str(number), part) for number, part in enumerate(values.chunk(64))]
    max_bytes = bucket_bytes(compose("ppo").config.actor_rollout_ref.rollout, settings.device)
    times = []
    for _ in range(2):
        synchronize(settings.device)
        begin = time.perf_counter()
        rows = whole(parameters)
        for bucket in to_buckets(
            rows, WHOLE, torch.float32, max_bytes, lambda size, _: group.allocate(size)
        ):
            group.send(bucket, WHOLE)
        group.send(len(times), WHOLE)
        _expect(pipe)
        times.append(time.perf_counter() - begin)
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


def _receive(pipe: Connection, address: GroupAddress, device: str) -> None:
    """Receive the weights of both syncs, verify them, and reply to each sync."""
    try:
        if device == "cuda":
            torch.cuda.set_device(torch.cuda.device_count() - 1)
        group = WeightGroup(address, 0, rank_info(device))
        for _ in range(2):
            for bucket in Broadcast(group):
                bucket.verify()
            pipe.send(None)
    except Exception as error:
        pipe.send(reason(error))
