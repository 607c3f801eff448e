"""A link from device to device, both ends in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.cluster import link
from rlctl.runtime.cluster.link import Link
from rlctl.runtime.rollout.weight_sync import to_buckets, uses_host_memory
from tests.distributed.ranks import rank_info
from tests.runtime.test_weights import parameters


def test_blocks_come_whole_and_in_order() -> None:
    door = Link.listen("127.0.0.1")
    with ThreadPoolExecutor(1) as elsewhere:
        there = elsewhere.submit(Link.to_trainer, "127.0.0.1", door.port, rank_info())
        sender, receiver = Link.to_engine(door, rank_info()), there.result()
        blocks = list(to_buckets(parameters(), torch.bfloat16, max_bytes=30_000))
        for block in blocks:
            fetched = elsewhere.submit(receiver.fetch, block.header())
            sender.send(block)
            arrived = fetched.result(timeout=600)
            arrived.verify()
            for one, other in zip(arrived.parameters, block.parameters, strict=True):
                assert torch.equal(one.tensor(), other.tensor())
                assert one.tensor().data_ptr() != other.tensor().data_ptr() or not one.data.numel()
    assert len(blocks) > 1
    sender.close()


def test_an_engine_that_does_not_come_is_not_waited_for_longer_than_the_deadline(
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
def test_the_way_that_weights_go(backend: str, device: str, host: bool) -> None:
    overrides = [f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}"]
    assert (
        uses_host_memory(compose("ppo", overrides).config.actor_rollout_ref.rollout, device) == host
    )


def test_a_way_that_cannot_carry_the_devices_tensors_is_refused() -> None:
    overrides = ["actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"]
    with pytest.raises(
        ConfigError, match=r"backend=nccl does not support trainer\.device=cpu"
    ) as refused:
        uses_host_memory(compose("ppo", overrides).config.actor_rollout_ref.rollout, "cpu")
    assert "auto, object_store or gloo" in str(refused.value)
