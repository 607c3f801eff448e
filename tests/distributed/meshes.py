"""Training of an actor on a mesh, with checks against one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from rlctl.runtime.model import load
from rlctl.runtime.model.lora import merged_parameters
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.background import await_written
from tests.distributed.ranks import rank_info
from tests.workers import actor, experience, update, weights

NUM_RANKS = 4
SECTIONS = ("actor_rollout_ref.actor", "critic", "reward.reward_model")
# Relative difference of gradients in float64 where each rank has all rows. With other rows on each
# rank they differ by 1e-7, because transformers' norms and routers compute in float32.
EXACT = 1e-12


def mesh(tensor: int = 1, sequence: int = 1, experts: int = 1) -> tuple[str, ...]:
    """Return the settings of a mesh; experts are divided over the shards of the parameters."""
    sizes = {
        "tensor_model_parallel_size": tensor,
        "ulysses_sequence_parallel_size": sequence,
        "expert_model_parallel_size": experts,
        "fsdp_size": -1 if experts == 1 else experts,
    }
    return tuple(
        f"{section}.fsdp_config.{key}={size}" for section in SECTIONS for key, size in sizes.items()
    )


@contextmanager
def float64() -> Iterator[None]:
    """Give models weights and passes in float64 where settings say float32."""
    names = ("fp32", "float32")
    with patch.dict(load._DTYPES, dict.fromkeys(names, torch.float64)):
        yield


PASSES = tuple(
    f"{model}.dtype=float32"
    for model in ("actor_rollout_ref.model", "critic.model", "reward.reward_model.model")
)


class Trained(NamedTuple):
    saved: Tensor  # weights after an update
    engine: dict[str, Tensor]  # in the form of rollout engines
    base: Tensor  # log-probs without adapters
    updated: Tensor  # weights after another update
    resumed: Tensor  # after the same update of what was saved


def train(where: RankInfo, model: str, folder: Path, settings: tuple[str, ...] = ()) -> Trained:
    """Update an actor, save it to `folder`, update it again, and do so again from the file."""
    worker = actor(where, model, settings)
    update(worker)
    worker.save(folder)
    await_written([folder], timeout_s=60)
    saved, engine = weights(worker), dict(merged_parameters(worker.policy.hf))
    update(worker)
    updated, base = weights(worker), worker.compute_log_probs(experience(), "base")
    worker.load(folder)
    update(worker)
    return Trained(saved, engine, base.log_probs.values, updated, weights(worker))


def check_trained(
    found: list[Trained], model: str, folder: Path, settings: tuple[str, ...] = ()
) -> None:
    """Check that all ranks resume exactly, and that one process loads and sends the same."""
    loaded = actor(rank_info(), model, settings)
    loaded.load(folder)
    alone, engine = weights(loaded), dict(merged_parameters(loaded.policy.hf))
    for rank in found:
        assert torch.equal(rank.saved, alone)
        assert rank.engine.keys() == engine.keys()
        assert all(torch.equal(rank.engine[name], engine[name]) for name in engine)
        assert torch.equal(rank.updated, rank.resumed)
        assert not torch.equal(rank.updated, rank.saved)
