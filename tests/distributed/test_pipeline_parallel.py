"""Stages of decoder layers give the gradient, metrics, values and state of one process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlctl.runtime.model.engine_weights import Selection
from rlctl.runtime.model.lora import merged_parameters
from rlctl.runtime.model.sharding import shard_of
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.weight_sync import Bucket, Joined, Part, to_buckets
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.background import await_written, begin_writing
from tests.distributed.meshes import NUM_RANKS, PASSES, SECTIONS, float64
from tests.distributed.ranks import on_ranks, rank_info
from tests.distributed.test_gradient import gradient
from tests.models import write_tiny_model
from tests.numerics.test_reward_model import gradient as reward_gradient
from tests.workers import actor, experience, update, weights

ROLES = ("actor", "critic")
LORA = "actor_rollout_ref.model.lora_rank=4"


def stages(number: int, schedule: str = "1f1b", **sizes: int) -> tuple[str, ...]:
    sizes = {"pipeline_model": number, **sizes}
    return tuple(
        f"{section}.fsdp_config.{each}"
        for section in SECTIONS
        for each in (
            *(f"{kind}_parallel_size={size}" for kind, size in sizes.items()),
            f"pipeline_schedule={schedule}",
        )
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "qwen3", vocab_size=264, num_hidden_layers=5)
    return folder


def buckets(worker: ActorWorker) -> list[Bucket]:
    """Return a copy of what a rank sends to engines, in buckets of 8 KiB."""
    shard = shard_of(worker.policy.hf, worker.rank_info.rank)
    assert shard is not None
    part = Part(*shard)
    rows = worker.engine_weights.rows(Selection.ALL, part.index)
    sent = list(to_buckets(rows, part, torch.float32, 2**13))
    return pickle.loads(pickle.dumps(sent))


class Found(NamedTuple):
    two: list[Tensor]  # gradients of the own layers of each role, by two stages
    reward: Tensor  # of a reward model
    four: tuple[Tensor, dict[str, float]]  # of the actor, by four stages
    sliced: Tensor  # of the actor, by two stages with slices of rows
    adapters: Tensor  # of the actor's LoRA adapters, by two stages of split layers
    log_probs: Tensor
    saved: Tensor
    engine: dict[str, Tensor]  # weights for the rollout engine
    buckets: list[Bucket]
    updated: Tensor  # after the save
    resumed: Tensor  # after the same update of what was saved


def on_mesh(where: RankInfo, model: str, folder: Path) -> Found:
    both = (*stages(2, tensor_model=2), LORA, *PASSES)
    with float64():
        two = [
            gradient(where, model, role, "token-mean", 2, (*stages(2), *PASSES))[0]
            for role in ROLES
        ]
        reward, _ = reward_gradient(where, model, None, (*stages(2, "gpipe"), *PASSES))
        four = gradient(where, model, "actor", "token-mean", 1, (*stages(4, "gpipe"), *PASSES))
        sliced = stages(2, ulysses_sequence=2)
        sliced, _ = gradient(where, model, "actor", "token-mean", 1, (*sliced, *PASSES))
        adapters, _ = gradient(where, model, "actor", "token-mean", 2, both)
    first = actor(where, model, stages(2))
    update(first)
    first.save(folder)
    await_written([folder], timeout_s=60)
    saved, engine, sent = weights(first), dict(merged_parameters(first.policy.hf)), buckets(first)
    log_probs = first.compute_log_probs(experience()).log_probs.values
    update(first)
    second = actor(where, model, stages(2, "gpipe"))
    second.load(folder)
    update(second)
    updated, resumed = weights(first), weights(second)
    return Found(
        two, reward, four, sliced, adapters, log_probs, saved, engine, sent, updated, resumed
    )


def joined(parts: list[Tensor], tied: int) -> Tensor:
    """Return the values of all layers from those of each stage, of which the last repeats some."""
    *others, last = parts
    assert torch.equal(last[:tied], parts[0][:tied])
    return torch.cat([*others, last[tied:]])


@pytest.mark.soak
def test_stages_do_not_change_the_numbers(model: Path, tmp_path: Path) -> None:
    begin_writing(tmp_path)
    folder = tmp_path / "state"
    found = on_ranks(NUM_RANKS, on_mesh, str(model), folder)

    with float64():
        expected = [
            gradient(rank_info(), str(model), role, "token-mean", 1, settings)
            for role, settings in (*((role, PASSES) for role in ROLES), ("actor", (LORA, *PASSES)))
        ]
        reward, _ = reward_gradient(rank_info(), str(model), None, PASSES)
    loaded = actor(rank_info(), str(model))
    loaded.load(folder)
    alone, engine = weights(loaded), dict(merged_parameters(loaded.policy.hf))
    tied = engine["model.embed_tokens.weight"].numel()
    log_probs = loaded.compute_log_probs(experience()).log_probs.values

    def close(one: Tensor, other: Tensor) -> None:
        assert (one - other).norm() <= 1e-6 * one.norm() > 0

    for pair in (found[:2], found[2:]):
        for number, role in enumerate(ROLES):
            parts = [rank.two[number] for rank in pair]
            close(expected[number][0], joined(parts, 0 if role == "critic" else tied))
        close(reward, torch.cat([each.reward for each in pair]))
    whole, metrics = expected[0]
    close(whole, joined([rank.four[0] for rank in found], tied))
    for rank in found:
        assert rank.four[1] == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    close(whole, joined([found[0].sliced, found[2].sliced], tied))
    close(expected[-1][0], torch.cat([found[0].adapters, found[2].adapters]))
    assert torch.equal(joined([each.saved for each in found[:2]], tied), alone)
    together = Joined()
    sent = [
        each
        for buckets in zip(*(rank.buckets for rank in found), strict=True)
        for bucket in buckets
        for each in together.add(bucket) or ()
    ]
    assert {each.name for each in sent} == engine.keys()
    assert all(torch.equal(each.tensor(), engine[each.name]) for each in sent)
    for rank in found:
        assert rank.engine.keys() == engine.keys()
        assert all(torch.equal(rank.engine[name], engine[name]) for name in engine)
        close(log_probs, rank.log_probs)
        assert torch.equal(rank.updated, rank.resumed)
        assert not torch.equal(rank.updated, rank.saved)
