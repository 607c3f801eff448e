"""Links between devices, with both ends in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.cluster import link
from rlctl.runtime.cluster.link import Link
from rlctl.runtime.rollout.weight_sync import WHOLE, to_buckets, uses_host_memory, whole
from tests.distributed.ranks import rank_info
from tests.runtime.test_weights import parameters


def test_buckets_arrive_intact_and_in_order() -> None:
    listener = Link.listen("127.0.0.1")
    with ThreadPoolExecutor(1) as executor:
        connected = executor.submit(Link.to_trainer, "127.0.0.1", listener.port, rank_info())
        sender, receiver = Link.to_engine(listener, rank_info()), connected.result()
        buckets = list(to_buckets(whole(parameters()), WHOLE, torch.bfloat16, 30_000))
        for bucket in buckets:
            fetched = executor.submit(receiver.fetch, bucket.header())
            sender.send(bucket)
            arrived = fetched.result(timeout=600)
            arrived.verify()
            for one, other in zip(arrived.parameters, bucket.parameters, strict=True):
                assert torch.equal(one.tensor(), other.tensor())
                assert one.tensor().data_ptr() != other.tensor().data_ptr() or not one.data.numel()
    assert len(buckets) > 1
    sender.close()


def test_connecting_to_an_absent_engine_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "_CONNECT_S", 0.5)
    with pytest.raises(RuntimeError, match="timeout"):
        Link.to_engine(Link.listen("127.0.0.1"), rank_info())


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
