"""Two ranks that split layers, rows, stages or experts give the gradient of one process.

`make soak` has four ranks, combined meshes, other roles, adapters, and saved states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from rlctl.runtime.rank_info import RankInfo
from tests.distributed.meshes import (
    EAGER,
    LORA,
    Case,
    check_gradients,
    gradients_of,
    mesh,
    stages,
    write_models,
)
from tests.distributed.ranks import on_ranks, rank_info
from tests.distributed.test_gradient import gradient
from tests.miniatures import miniature
from tests.models import tiny_tokenizer

REPLAY = (*EAGER, "actor_rollout_ref.actor.router_replay.mode=R3")
OFFLOAD = "actor_rollout_ref.actor.fsdp_config.offload_policy=true"  # no-op on CPUs
CASES = (
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
    return gradients_of(where, models, CASES), of_replicas(where, str(models / "dense"))


def test_two_ranks_do_not_change_the_gradient(tmp_path: Path) -> None:
    """Ranks that split the model, and replicas, which add their gradients once per block."""
    models = write_models(tmp_path, ["qwen3_moe"])
    for kind in ("qwen3_5_text", "bloom"):
        tiny_tokenizer().save_pretrained(models / kind)
        miniature(kind, models / kind, vocab_size=264).save_pretrained(models / kind)
    ranks = on_ranks(2, on_two_ranks, models)
    check_gradients([divided for divided, _ in ranks], models, CASES)
    num_blocks = 3  # two layers, and the parameters outside them
    whole, _ = gradient(rank_info(), str(models / "dense"), "actor", "token-mean", 1)
    for _, (replica, num_sums) in ranks:
        assert (whole - replica).norm() <= 1e-6 * whole.norm() > 0
        assert num_sums == num_blocks
