"""A vision-language model on two ranks, of which one has no images, against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlctl.runtime.batch import Experience, Ragged
from rlctl.runtime.rank_info import RankInfo
from tests import workers
from tests.configs import configured
from tests.distributed.ranks import on_ranks, rank_info
from tests.vlm import CHATS, prompts_of, write_vlm
from tests.workers import LOSS, actor_of, experience

OF_ROW = (0, 0, 1, 3, 2, 2, 2, 2)  # chats; the last four rows have no images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vlm("qwen2_5_vl", tmp_path_factory.mktemp("vlm"))


def batch_of(folder: Path) -> Experience:
    batch, prompts = experience(), prompts_of(folder)
    ids = batch.response_ids.values
    return replace(
        batch,
        prompt_ids=Ragged.from_rows([prompts[i] for i in OF_ROW], torch.int64),
        response_ids=batch.response_ids.like(torch.where(ids < 20, ids + 20, ids)),
        images=[CHATS[i][1] for i in OF_ROW],
    )


def gradients(
    where: RankInfo, folder: str, frozen: str, rows: str, *more: str
) -> dict[str, torch.Tensor]:
    """Return the gradients of an update; micro-batches have at most `rows` rows."""
    given = [f"actor_rollout_ref.model.path={folder}", *LOSS]
    sizes = [
        f"actor_rollout_ref.actor.freeze_vision_tower={frozen}",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={rows}",
        *more,
    ]
    worker = actor_of(where, configured("ppo", given, sizes))
    mine = torch.arange(8).tensor_split(where.world_size)[where.rank]
    return workers.gradients(worker, batch_of(Path(folder)).select(mine))[0]


@pytest.mark.parametrize("frozen", ["true", "false"])
def test_ranks_and_micro_batches_change_nothing(folder: Path, frozen: str) -> None:
    whole = gradients(rank_info(), str(folder), frozen, "8")
    cut = gradients(rank_info(), str(folder), frozen, "2")
    (first, second) = on_ranks(2, gradients, str(folder), frozen, "2")
    assert any("visual" in name for name in whole) is (frozen == "false")
    recompute = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    recomputed = gradients(rank_info(), str(folder), frozen, "8", recompute)
    for other in (cut, recomputed, first, second):
        assert other.keys() == whole.keys()
        for name, gradient in whole.items():
            assert float((other[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-7
