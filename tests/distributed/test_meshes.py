"""Ranks that share rows (Ulysses), layers, stages, experts or several of them.

They give the gradient and metrics of one process. Those of four ranks, combined meshes, adapters
and saved states are in `make soak`; `tests.e2e.soak` trains and resumes on meshes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.runtime.base.ops import sum_of_squared_probs
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.attention import Packing
from rlctl.runtime.model.kernels import Reach
from rlctl.runtime.model.sequence_parallel import SequenceGroup
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.vocabulary import Vocabulary
from rlctl.runtime.workers.background import begin_writing
from tests.distributed.meshes import (
    EAGER,
    EXACT,
    LORA,
    NUM_RANKS,
    Case,
    Trained,
    check_gradients,
    check_trained,
    gradients_of,
    mesh,
    stages,
    train,
    write_models,
)
from tests.distributed.ranks import on_ranks, rank_info
from tests.distributed.test_gradient import APART, exact_gradient, gradient
from tests.miniatures import miniature
from tests.models import tiny_tokenizer
from tests.tolerance import assert_as_exact
from tests.workers import actor, experience, weights

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
    Case("actor", mesh(2), settings=APART),
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
HALVES = torch.arange(8).chunk(2)  # of the rows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.plugin("objectives")
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


class Found(NamedTuple):
    attention: list[Tensor]
    squares: Tensor  # Σ p² of random logits
    best: Tensor  # their three largest
    trained: Trained  # a mixture whose experts are divided
    loaded: Tensor  # its weights on another mesh
    chosen: list[Tensor]  # experts of the tokens of the rows that two ranks share


def on_mesh(where: RankInfo, models: Path, folder: Path) -> Found:
    group = torch.distributed.group.WORLD
    assert group is not None
    vocabulary, own = Vocabulary(group), logits().chunk(NUM_RANKS, -1)[where.rank]
    mixture = str(models / "qwen3_moe")
    trained = train(where, mixture, folder / "state", mesh(experts=2))
    recording = actor(where, mixture, (*mesh(tensor=2), R2))
    routing = recording.compute_log_probs(experience().chunk(HALVES)[where.rank // 2]).routing
    second = actor(where, mixture, mesh(tensor=2, experts=2))
    second.load(folder / "state")
    return Found(
        attend(SequenceGroup(group, where.rank, NUM_RANKS)),
        vocabulary.sum_of_squared_probs(own, 0.7),
        vocabulary.top_k(own, 3),
        trained,
        weights(second),
        [] if routing is None else routing.rows(),
    )


@pytest.mark.soak
def test_states_of_four_ranks_are_those_of_one_process(models: Path, tmp_path: Path) -> None:
    begin_writing(tmp_path)
    found = on_ranks(NUM_RANKS, on_mesh, models, tmp_path)
    attention = attend(None)
    recording, batch = actor(rank_info(), str(models / "qwen3_moe"), (R2,)), experience()
    routing = recording.compute_log_probs(batch).routing
    for number, rank in enumerate(found):
        for mine, whole in zip(rank.attention, attention, strict=True):
            torch.testing.assert_close(mine, whole)
        torch.testing.assert_close(rank.squares, sum_of_squared_probs(logits(), 0.7))
        assert torch.equal(rank.best, logits().topk(3).indices)
        assert torch.equal(rank.loaded, rank.trained.saved)
        for row, mine in zip(HALVES[number // 2].tolist(), rank.chosen, strict=True):
            assert torch.equal(routing.rows()[row], mine)
    metrics = recording.update(replace(batch, routing=routing), lr=1e-3)
    assert metrics["training/router_agreement"].value == 1
    mixture = str(models / "qwen3_moe")
    check_trained([rank.trained for rank in found], mixture, tmp_path / "state")


REPLAY = (*EAGER, "actor_rollout_ref.actor.router_replay.mode=R3")
OFFLOAD = "actor_rollout_ref.actor.fsdp_config.offload_policy=true"  # no-op on CPUs
TWO_RANKS = (
    Case("critic", stages(2), joins=((0, 1),)),
    Case("actor", mesh(tensor=2)),
    Case("actor", (*mesh(sequence=2), OFFLOAD)),
    Case("actor", mesh(experts=2), model="qwen3_moe", settings=EAGER),
    Case("replay", mesh(tensor=2), model="qwen3_moe", settings=REPLAY),
    Case("replay", stages(2), model="qwen3_moe", settings=REPLAY, joins=((0, 1),)),
    Case("actor", (), model="qwen3_5_text"),
    Case("actor", (), model="qwen3_5_text", settings=LORA),
    Case("actor", (), model="bloom"),  # padded rows: ranks call the decoder equally often
)


def of_replicas(where: RankInfo, model: str) -> tuple[Tensor, int]:
    """Return the gradient of two replicas, and the number of times that they add gradients."""
    sums: list[int] = []
    reduce = dist.all_reduce

    def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sums.append(int(kwargs.get("group") is not None and tensor.numel() > 100))
        return reduce(tensor, *args, **kwargs)

    replicas = "actor_rollout_ref.actor.fsdp_config.fsdp_size=1"
    with patch.object(dist, "all_reduce", count):
        found, _ = gradient(where, model, "actor", "token-mean", 4, (replicas,))
    return found, sum(sums)


def on_two_ranks(where: RankInfo, models: Path) -> tuple[list[Any], tuple[Tensor, int]]:
    return gradients_of(where, models, TWO_RANKS), of_replicas(where, str(models / "dense"))


def test_two_ranks_do_not_change_the_gradient(tmp_path: Path) -> None:
    """Ranks that split the model, and replicas, which add their gradients once per block."""
    models = write_models(tmp_path, ["qwen3_moe"])
    for kind in ("qwen3_5_text", "bloom"):
        tiny_tokenizer().save_pretrained(models / kind)
        miniature(kind, models / kind, vocab_size=264).save_pretrained(models / kind)
    ranks = on_ranks(2, on_two_ranks, models)
    check_gradients([divided for divided, _ in ranks], models, TWO_RANKS)
    num_blocks = 3  # two layers, and the parameters outside them
    whole, _ = gradient(rank_info(), str(models / "dense"), "actor", "token-mean", 1)
    exact, _ = exact_gradient(str(models / "dense"), "actor")
    for _, (replica, num_sums) in ranks:
        assert whole.norm() > 0
        assert_as_exact(replica, whole, exact)
        assert num_sums == num_blocks
