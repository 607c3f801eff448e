"""Weights to the two workers of a server: by a process group, and by a folder.

The server is a stand-in; in the soak it is vLLM.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
import torch
from transformers import PreTrainedModel

from rlctl.errors import RlctlError
from rlctl.plugins.bridges.vllm_server import VLLMServerEngine
from rlctl.runtime.rollout.http_server import LostServerError
from rlctl.runtime.rollout.rendezvous import listen
from rlctl.runtime.rollout.signed_store import SignedStore, new_secret, open_store
from rlctl.runtime.rollout.weight_group import BROKEN, BrokenGroupError, GroupAddress, WeightGroup
from rlctl.runtime.rollout.weight_sync import Bucket, Part, to_buckets
from tests.distributed.ranks import rank_info
from tests.e2e.soak_engines import vllm_server
from tests.generation import engine_spec, full_forward, prompts, sampling
from tests.models import mixture_model, tiny_model
from tests.plugins.bridges.vllm_server import Server

KEY = "actor_rollout_ref.rollout"
NUM_WORKERS, NUM_PARTS = 2, 2
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
VLLM = [pytest.mark.extra("vllm"), pytest.mark.slow, pytest.mark.soak]
SERVERS = [pytest.param(kind, marks=VLLM) for kind in ("dense", "qwen3_moe")]


@dataclass
class Setup:
    """Client of a server, and what builds the policy from a seed."""

    engine: VLLMServerEngine
    build: Callable[[int], PreTrainedModel]
    server: subprocess.Popen[bytes] | None  # None: a stand-in

    def send(self, seed: int, fault: str = "") -> int | None:
        """Send a policy's weights in a group with two senders; return what the client returns."""
        store = open_store(listen("127.0.0.1", 9), 9, timedelta(seconds=60))
        address = GroupAddress("127.0.0.1", store.port, NUM_WORKERS, new_secret())
        model = self.build(seed)
        with ThreadPoolExecutor(NUM_PARTS) as executor:
            sent = [
                executor.submit(_send, address, model, index, fault, self.server)
                for index in range(NUM_PARTS)
            ]
            try:
                version = self.engine.receive_weights(address, 0)
            except RlctlError:
                SignedStore(store, address.secret).set(
                    BROKEN, ""
                )  # as the driver does, so that the senders leave
                raise
        if version is not None:
            assert all(part.result() is not None for part in sent)
        return version

    def check(self, seed: int) -> None:
        """Generate, and compare the log-probs with those of the policy."""
        rows, model = prompts(4, 9), self.build(seed)
        found = self.engine.generate(rows, sampling(max_tokens=6, n=2))
        for row, ids in enumerate(found.response_ids.rows()):
            wanted = full_forward(model, rows.rows()[row // 2], ids, 1.0)
            torch.testing.assert_close(found.log_probs.rows()[row], wanted, atol=1e-4, rtol=0)


def _send(
    address: GroupAddress,
    model: PreTrainedModel,
    index: int,
    fault: str,
    server: subprocess.Popen[bytes] | None,
) -> WeightGroup | None:
    """Send half of the rows, with a `fault` in the second bucket; return the group if it lasts."""
    part, group = Part(index, NUM_PARTS), WeightGroup(address, Part(index, NUM_PARTS), rank_info())
    rows = (
        (name, value.detach().tensor_split(NUM_PARTS)[index], value.numel())
        for name, value in model.named_parameters()
    )
    try:
        for bucket in to_buckets(rows, part, torch.float32, 20_000):
            if bucket.header.number == 1 and fault == "corrupted":
                bucket = Bucket(bucket.header, bucket.data.flip(0))
            if bucket.header.number == index == 1 and fault == "lost":
                group.close()
                return None
            if bucket.header.number == index == 1 and server and fault in SIGNALS:
                os.killpg(server.pid, SIGNALS[fault])
            group.send(bucket, part)
        group.send(7, part)
    except BrokenGroupError:
        return None
    return group


@pytest.fixture(
    scope="module",
    params=["stand-in", *SERVERS],
)
def setup(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setup]:
    folder, kind = tmp_path_factory.mktemp("server"), request.param

    def build(seed: int) -> PreTrainedModel:
        return mixture_model(kind, seed) if kind == "qwen3_moe" else tiny_model(seed=seed)

    build(0).save_pretrained(folder / "model")
    options = ("--tensor-parallel-size", str(NUM_WORKERS), "--skip-tokenizer-init")
    stand_in = Server(build(0)).start() if kind == "stand-in" else None
    started = nullcontext((stand_in.url, None)) if stand_in else vllm_server(folder, *options)
    with started as (url, process):
        address = f"+{KEY}.engine_kwargs.url={url}"
        spec = engine_spec(folder / "model", f"{KEY}.name=vllm_server", address)
        engine = VLLMServerEngine.from_spec(spec, None)
        yield Setup(engine, build, process)
        engine.close()
    if stand_in:
        stand_in.shutdown()


def test_a_group_and_a_folder_bring_the_same_weights(setup: Setup) -> None:
    assert setup.engine.num_receivers("cpu", "127.0.0.1") == NUM_WORKERS
    assert setup.engine.num_receivers("cuda", "127.0.0.1") == 0
    for seed in (1, 2):
        assert setup.send(seed) == 7
        setup.check(seed)
    setup.engine.load_weights(setup.build(3).named_parameters())
    setup.check(3)


def test_corrupted_weights_end_the_run(setup: Setup) -> None:
    with pytest.raises(RlctlError, match="weights were corrupted in transit: bucket 1") as raised:
        setup.send(1, "corrupted")
    assert not isinstance(raised.value, LostServerError)


def test_workers_leave_a_group_that_breaks_and_join_the_next(setup: Setup) -> None:
    assert setup.send(4, "lost") is None
    assert setup.send(5) == 7
    setup.check(5)


@pytest.mark.parametrize("setup", SERVERS, indirect=True)
def test_a_server_that_hung_gets_all_weights_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, server = setup.engine.spec, setup.server
    assert server is not None
    soon = replace(spec, rank_info=replace(spec.rank_info, timeout_s=5.0))
    monkeypatch.setattr(setup.engine, "spec", soon)
    with pytest.raises(LostServerError, match="did not reply to /collective_rpc within 5 s"):
        setup.send(6, "stop")
    os.killpg(server.pid, signal.SIGCONT)
    monkeypatch.undo()
    assert setup.send(7) == 7
    setup.check(7)


@pytest.mark.parametrize("setup", SERVERS, indirect=True)
def test_a_server_that_dies_in_the_middle_is_lost(setup: Setup) -> None:
    """The last test of a server: the senders leave, and the client names the loss."""
    with pytest.raises(LostServerError, match="lost the connection"):
        setup.send(6, "kill")
