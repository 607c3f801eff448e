"""Two ranks that split layers, rows, stages or experts give the gradient of one process.

`make soak` has four ranks, combined meshes, other roles, adapters, and saved states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, cat

from rlctl.runtime.rank_info import RankInfo
from tests.distributed.meshes import PASSES, float64, mesh
from tests.distributed.ranks import on_ranks, rank_info
from tests.distributed.test_expert_parallel import actors_gradient
from tests.distributed.test_gradient import gradient
from tests.distributed.test_pipeline_parallel import stages
from tests.models import MIXTURES, mixture_model, tiny_tokenizer, write_tiny_model

OFFLOAD = "actor_rollout_ref.actor.fsdp_config.param_offload=true"  # no-op on CPUs


def of_role(where: RankInfo, model: str, role: str, *settings: str) -> Tensor:
    """Return the gradient of a role, with two micro-batches on a mesh and one without."""
    micro_batches = 2 if settings else 1
    return gradient(where, model, role, "token-mean", micro_batches, (*settings, *PASSES))[0]


def on_two_ranks(where: RankInfo, dense: str, mixture: Path) -> list[Tensor]:
    with float64():
        return [
            of_role(where, dense, "critic", *stages(2)),
            of_role(where, dense, "actor", *mesh(tensor=2)),
            of_role(where, dense, "actor", *mesh(sequence=2), OFFLOAD),
            actors_gradient(where, mixture, 2, *mesh(experts=2)),
        ]


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


def test_replicas_add_their_gradients_once(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    whole, _ = gradient(rank_info(), str(model), "actor", "token-mean", 1)
    num_blocks = 3  # two layers, and the parameters outside them
    for found, num_sums in on_ranks(2, of_replicas, str(model)):
        assert (whole - found).norm() <= 1e-6 * whole.norm() > 0
        assert num_sums == num_blocks


def test_two_ranks_that_split_the_model_do_not_change_the_gradient(tmp_path: Path) -> None:
    dense, mixture = tmp_path / "dense", tmp_path / "mixture"
    write_tiny_model(dense, "qwen3", vocab_size=264, num_key_value_heads=4)
    tiny_tokenizer().save_pretrained(mixture)
    mixture_model(next(iter(MIXTURES)), vocab_size=264).save_pretrained(mixture)
    found = on_ranks(2, on_two_ranks, str(dense), mixture)

    with float64():
        critic = of_role(rank_info(), str(dense), "critic")
        actor = of_role(rank_info(), str(dense), "actor")
        experts = actors_gradient(rank_info(), mixture, 1)

    def check(expected: Tensor, mine: Tensor) -> None:
        assert (expected - mine).norm() <= 1e-6 * expected.norm() > 0

    check(critic, cat([rank[0] for rank in found]))  # each stage has its own layers
    for rank in found:
        for expected, mine in zip((actor, actor, experts), rank[1:], strict=True):
            check(expected, mine)
