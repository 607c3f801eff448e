"""Links between devices, with both ends in this process."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.cluster import link
from rlctl.runtime.cluster.link import Link
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.weight_sync import (
    WHOLE,
    BucketHeader,
    to_buckets,
    uses_host_memory,
    whole,
)
from tests.distributed.ranks import rank_info
from tests.fake_nccl import FakeNCCL
from tests.runtime.test_weights import parameters
from tests.second_device import SecondDevice


def test_buckets_arrive_intact_and_in_order() -> None:
    listener = Link.listen("127.0.0.1")
    with ThreadPoolExecutor(1) as executor:
        connected = executor.submit(Link.to_trainer, "127.0.0.1", listener.port, rank_info())
        sender, receiver = Link.to_engine(listener, rank_info()), connected.result()
        buckets = list(to_buckets(whole(parameters()), WHOLE, torch.bfloat16, 30_000))
        for bucket in buckets:
            fetched = executor.submit(receiver.fetch, bucket.header)
            sender.send(bucket)
            arrived = fetched.result(timeout=600)
            arrived.verify()
            assert torch.equal(arrived.data, bucket.data)
            assert arrived.data.data_ptr() != bucket.data.data_ptr()
    assert len(buckets) > 1
    sender.close()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNCCL]:
    """Let this machine have GPUs, and NCCL between them."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    FakeNCCL.gpu.number = 0
    return FakeNCCL.reset()


GPU = replace(rank_info(), device="cuda", timeout_s=60.0)


def receive(port: int, headers: Iterable[BucketHeader], gpu: int) -> list[Tensor]:
    """Fetch buckets on a GPU; return their bytes on the CPU."""
    FakeNCCL.gpu.number = gpu
    with SecondDevice("cuda"):
        link = Link.to_trainer("127.0.0.1", port, GPU)
        found = []
        for header in headers:
            bucket = link.fetch(header)
            bucket.verify()
            found.append(bucket.data.cpu())
        return found


def test_buckets_arrive_between_gpus(nccl: type[FakeNCCL]) -> None:
    listener = Link.listen("127.0.0.1")
    with ThreadPoolExecutor(1) as executor, SecondDevice("cuda"):
        rows = whole(parameters())
        buckets = list(to_buckets(rows, WHOLE, torch.bfloat16, 30_000, "cuda"))
        headers = [bucket.header for bucket in buckets]
        received = executor.submit(receive, listener.port, headers, 1)
        link = Link.to_engine(listener, GPU)
        assert nccl.num_communicators == 0, "NCCL connects at the first call"
        for bucket in buckets:
            link.send(bucket)
        found = received.result(timeout=600)
        sent = [bucket.data.cpu() for bucket in buckets]
    assert all(torch.equal(one, other) for one, other in zip(sent, found, strict=True))
    assert (nccl.num_communicators, nccl.num_calls) == (1, len(buckets))


def test_nccl_refuses_two_ends_on_one_gpu_and_buckets_on_a_cpu(nccl: type[FakeNCCL]) -> None:
    listener = Link.listen("127.0.0.1")
    with ThreadPoolExecutor(1) as executor, SecondDevice("cuda"):
        on_cpu, on_gpu = (
            next(to_buckets(whole(parameters()), WHOLE, torch.bfloat16, 30_000, device))
            for device in ("cpu", "cuda")
        )
        received = executor.submit(receive, listener.port, [on_gpu.header], 0)
        link = Link.to_engine(listener, GPU)
        with pytest.raises(RuntimeError, match="must be CUDA"):
            link.send(on_cpu)
        with pytest.raises(RuntimeError, match="Duplicate GPU"):
            link.send(on_gpu)
        with pytest.raises(RuntimeError, match="Duplicate GPU"):
            received.result(timeout=600)


@pytest.mark.parametrize("where", [rank_info(), GPU], ids=["cpu", "cuda"])
def test_connecting_to_an_absent_engine_times_out(
    where: RankInfo, nccl: type[FakeNCCL], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_CONNECT_S", 0.5)
    with pytest.raises(RuntimeError, match="time"):
        Link.to_engine(Link.listen("127.0.0.1"), where)


@pytest.mark.parametrize(
    ("backend", "device", "host"),
    [
        ("auto", "cpu", True),
        ("auto", "cuda", False),
        ("object_store", "cuda", True),
        ("gloo", "cpu", False),
    ],
)
def test_uses_host_memory_depends_on_backend_and_device(
    backend: str, device: str, host: bool
) -> None:
    overrides = [f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}"]
    assert (
        uses_host_memory(compose("ppo", overrides).config.actor_rollout_ref.rollout, device) == host
    )


def test_backend_that_does_not_support_the_device_is_rejected() -> None:
    overrides = ["actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"]
    with pytest.raises(
        ConfigError, match=r"backend=nccl does not support trainer\.device=cpu"
    ) as raised:
        uses_host_memory(compose("ppo", overrides).config.actor_rollout_ref.rollout, "cpu")
    assert "auto, object_store or gloo" in str(raised.value)
