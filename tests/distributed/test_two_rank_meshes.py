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


def on_two_ranks(
    where: RankInfo, dense: str, mixture: Path
) -> tuple[list[Tensor], tuple[Tensor, int]]:
    with float64():
        divided = [
            of_role(where, dense, "critic", *stages(2)),
            of_role(where, dense, "actor", *mesh(tensor=2)),
            of_role(where, dense, "actor", *mesh(sequence=2), OFFLOAD),
            actors_gradient(where, mixture, 2, *mesh(experts=2)),
        ]
    return divided, of_replicas(where, dense)


def test_two_ranks_do_not_change_the_gradient(tmp_path: Path) -> None:
    """Ranks that split the model, and replicas, which add their gradients once per block."""
    dense, mixture = tmp_path / "dense", tmp_path / "mixture"
    write_tiny_model(dense, "qwen3", vocab_size=264, num_key_value_heads=4)
    tiny_tokenizer().save_pretrained(mixture)
    mixture_model(next(iter(MIXTURES)), vocab_size=264).save_pretrained(mixture)
    ranks = on_ranks(2, on_two_ranks, str(dense), mixture)

    with float64():
        critic = of_role(rank_info(), str(dense), "critic")
        actor = of_role(rank_info(), str(dense), "actor")
        experts = actors_gradient(rank_info(), mixture, 1)

    def check(expected: Tensor, mine: Tensor) -> None:
        assert (expected - mine).norm() <= 1e-6 * expected.norm() > 0

    check(critic, cat([divided[0] for divided, _ in ranks]))  # each stage has its own layers
    num_blocks = 3  # two layers, and the parameters outside them
    whole, _ = gradient(rank_info(), str(dense), "actor", "token-mean", 1)
    for divided, (replica, num_sums) in ranks:
        for expected, mine in zip((actor, actor, experts), divided[1:], strict=True):
            check(expected, mine)
        check(whole, replica)
        assert num_sums == num_blocks
