"""Four ranks that share rows (Ulysses), layers, stages, experts or several of them.

They give the gradient, metrics, weights and state of one process.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlctl.runtime.model.attention import Packing
from rlctl.runtime.model.engine_weights import Selection
from rlctl.runtime.model.kernels import Reach
from rlctl.runtime.model.lora import merged_parameters
from rlctl.runtime.model.sequence_parallel import SequenceGroup
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.sharding import shard_of
from rlctl.runtime.model.vocabulary import Vocabulary
from rlctl.runtime.ops import sum_of_squared_probs
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.weight_sync import Bucket, Joined, Part, to_buckets
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.background import await_written, begin_writing
from tests.distributed.meshes import (
    EAGER,
    EXACT,
    LORA,
    NUM_RANKS,
    PASSES,
    Case,
    Trained,
    check_gradients,
    check_trained,
    float64,
    gradients_of,
    mesh,
    stages,
    train,
    write_models,
)
from tests.distributed.ranks import on_ranks, rank_info
from tests.workers import actor, experience, update, weights

R2, R3 = (f"actor_rollout_ref.actor.router_replay.mode={mode}" for mode in ("R2", "R3"))
PAIRS = ((0, 1), (2, 3))  # ranks of two stages
CASES = (
    # Ranks of a row.
    *(
        Case(role, mesh(1, 2), model="two_kv_heads")
        for role in ("actor", "critic", "distill", "sft", "dpo", "reward")
    ),
    Case("actor", mesh(1, 2), model="two_kv_heads", settings=LORA),
    Case("actor", mesh(1, 4), 1, model="two_kv_heads"),
    # Ranks of a layer; exact where all have all rows.
    *(Case(role, mesh(2)) for role in ("actor", "critic", "distill", "dpo")),
    Case("actor", mesh(4), 1, tolerance=EXACT),
    Case("critic", mesh(2, 2), 1, tolerance=EXACT),
    Case("reward", mesh(2, 2)),
    # Experts: of two replicas, of ranks that share rows, that split layers, that do both.
    *(
        Case("actor", each, model="qwen3_moe", settings=EAGER)
        for each in (
            mesh(experts=2),
            mesh(experts=4, sequence=2),
            mesh(tensor=2),
            mesh(tensor=2, experts=2),
        )
    ),
    *(Case("actor", mesh(tensor=2), model=kind, settings=EAGER) for kind in ("mixtral", "olmoe")),
    *(
        Case("replay", each, model="qwen3_moe", settings=(*EAGER, R3))
        for each in (mesh(experts=4, sequence=2), mesh(tensor=2))
    ),
    # Stages of layers.
    *(Case(role, stages(2), model="deep", joins=PAIRS) for role in ("actor", "critic")),
    Case("reward", stages(2, "gpipe"), model="deep", joins=PAIRS),
    Case("actor", stages(4, "gpipe"), 1, model="deep", joins=((0, 1, 2, 3),)),
    Case("actor", stages(2, ulysses_sequence=2), 1, model="deep", joins=((0, 2), (1, 3))),
    Case("actor", stages(2, tensor_model=2), model="deep", settings=LORA, joins=((0, 2), (1, 3))),
)
# Model, settings on the mesh, and settings of one process as well.
TRAINED = (
    ("two_kv_heads", mesh(1, 2), ()),
    ("dense", mesh(2), ()),
    ("dense", mesh(2), (*LORA, *PASSES)),
    ("qwen3_moe", mesh(experts=2), ()),
)
HALVES = torch.arange(8).chunk(2)  # of the rows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.soak
def test_meshes_of_four_ranks_do_not_change_the_gradient(models: Path) -> None:
    check_gradients(on_ranks(NUM_RANKS, gradients_of, models, CASES), models, CASES)


def attend(group: SequenceGroup | None) -> list[Tensor]:
    """Return the output for all tokens of attention with windows and sinks, and its gradients."""
    lengths = torch.tensor([5, 1, 8])
    num_tokens = int(lengths.sum())  # no multiple of the ranks
    draw = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, heads, 4) for heads in (12, 3, 3)]
    leaves = [torch.randn(shape, generator=draw) for shape in (*shapes, (12,))]
    for leaf in leaves:
        leaf.requires_grad_()
    query, key, value, sinks = leaves
    packing, tokens = Packing.from_lengths(lengths, "cpu"), torch.arange(num_tokens)
    reach = Reach(0.5, 3, sinks)
    if group is None:
        out = packing.attend(0, query, key, value, reach)
    else:
        own = group.slice(Sequences(tokens, packing, tokens, tokens, tokens[:3]))
        ids = own.sequences.ids  # of padding: 0
        part = own.sequences.packing.attend(0, query[ids], key[ids], value[ids], reach)
        out = own.join_tokens(part[own.sequences.predictors])
    (out * torch.randn(out.shape, generator=draw)).sum().backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if group is not None:
        for each in gradients:
            torch.distributed.all_reduce(each)
    return [out.detach(), *gradients]


def logits() -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * 3


def buckets(worker: ActorWorker) -> list[Bucket]:
    """Return a copy of what a rank sends to engines, in buckets of 8 KiB."""
    shard = shard_of(worker.policy.hf, worker.rank_info.rank)
    assert shard is not None
    part = Part(*shard)
    rows = worker.engine_weights.rows(Selection.ALL, part.index)
    return pickle.loads(pickle.dumps(list(to_buckets(rows, part, torch.float32, 2**13))))


class Staged(NamedTuple):
    trained: Trained  # by two stages; the base are the log-probs after the first update
    buckets: list[Bucket]


def train_stages(where: RankInfo, model: str, folder: Path) -> Staged:
    """Update an actor and save it; resume with another schedule, and update both again."""
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
    return Staged(Trained(saved, engine, log_probs, weights(first), weights(second)), sent)


class Found(NamedTuple):
    attention: list[Tensor]
    squares: Tensor  # Σ p² of random logits
    best: Tensor  # their three largest
    trained: list[Trained]  # as `TRAINED` says
    loaded: Tensor  # weights of the mixture on another mesh
    chosen: list[Tensor]  # experts of the tokens of the rows that two ranks share
    staged: Staged


def on_mesh(where: RankInfo, models: Path, folder: Path) -> Found:
    group = torch.distributed.group.WORLD
    assert group is not None
    vocabulary, own = Vocabulary(group), logits().chunk(NUM_RANKS, -1)[where.rank]
    trained: list[Trained] = []
    for number, (model, divided, settings) in enumerate(TRAINED):
        if settings:
            with float64():
                found = train(where, str(models / model), folder / "2", (*divided, *settings))
        else:
            found = train(where, str(models / model), folder / str(number), divided)
        trained.append(found)
    mixture = str(models / "qwen3_moe")
    recording = actor(where, mixture, (*mesh(tensor=2), R2))
    routing = recording.compute_log_probs(experience().chunk(HALVES)[where.rank // 2]).routing
    second = actor(where, mixture, mesh(tensor=2, experts=2))
    second.load(folder / "3")
    return Found(
        attend(SequenceGroup(group, where.rank, NUM_RANKS)),
        vocabulary.sum_of_squared_probs(own, 0.7),
        vocabulary.top_k(own, 3),
        trained,
        weights(second),
        [] if routing is None else routing.rows(),
        train_stages(where, str(models / "deep"), folder / "stages"),
    )


@pytest.mark.soak
def test_states_of_four_ranks_are_those_of_one_process(models: Path, tmp_path: Path) -> None:
    begin_writing(tmp_path)
    found = on_ranks(NUM_RANKS, on_mesh, models, tmp_path)
    attention = attend(None)
    recording, batch = actor(rank_info(), str(models / "qwen3_moe"), (R2,)), experience()
    routing = recording.compute_log_probs(batch).routing
    assert routing is not None
    for number, rank in enumerate(found):
        for mine, whole in zip(rank.attention, attention, strict=True):
            torch.testing.assert_close(mine, whole)
        torch.testing.assert_close(rank.squares, sum_of_squared_probs(logits(), 0.7))
        assert torch.equal(rank.best, logits().topk(3).indices)
        assert (rank.loaded == rank.trained[3].saved).all()
        for row, mine in zip(HALVES[number // 2].tolist(), rank.chosen, strict=True):
            assert torch.equal(routing.rows()[row], mine)
    metrics = recording.update(replace(batch, routing=routing), lr=1e-3)
    assert metrics["training/router_agreement"].value == 1
    for number, (model, _, settings) in enumerate(TRAINED):
        given: Any = [rank.trained[number] for rank in found], str(models / model)
        if not settings:
            check_trained(*given, tmp_path / str(number))
            continue
        with float64():
            check_trained(*given, tmp_path / str(number), settings)
            check_adapters(given[0], train(rank_info(), given[1], tmp_path / "alone", settings))
    check_stages([rank.staged for rank in found], str(models / "deep"), tmp_path / "stages")


def check_adapters(found: list[Trained], expected: Trained) -> None:
    """Compare log-probs and weights after two updates of 1e-3: of A, the first gradient is 0."""
    for rank in found:
        for mine, alone in zip(rank[2:], expected[2:], strict=True):
            torch.testing.assert_close(mine, alone, rtol=0, atol=1e-6)
        for name, alone in expected.engine.items():
            torch.testing.assert_close(rank.engine[name], alone, rtol=0, atol=1e-6)


def check_stages(found: list[Staged], model: str, folder: Path) -> None:
    """Check that one process loads, computes and sends what the stages do."""
    loaded = actor(rank_info(), model)
    loaded.load(folder)
    alone, engine = weights(loaded), dict(merged_parameters(loaded.policy.hf))
    log_probs = loaded.compute_log_probs(experience()).log_probs.values
    first, last = (rank.trained.saved for rank in found[:2])
    tied = engine["model.embed_tokens.weight"].numel()
    assert torch.equal(torch.cat([first, last[tied:]]), alone)
    together = Joined()
    sent = [
        each
        for buckets in zip(*(rank.buckets for rank in found), strict=True)
        for bucket in buckets
        for each in together.add(bucket) or ()
    ]
    assert {name for name, _ in sent} == engine.keys()
    assert all(torch.equal(value, engine[name]) for name, value in sent)
    for rank, _ in found:
        assert rank.engine.keys() == engine.keys()
        assert all(torch.equal(rank.engine[name], engine[name]) for name in engine)
        assert (log_probs - rank.base).norm() <= 1e-6 * log_probs.norm() > 0
        assert torch.equal(rank.updated, rank.resumed)
        assert not torch.equal(rank.updated, rank.saved)
