"""Saved worker state loads bitwise on the same number of ranks, and up to rounding on another."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.background import await_written, begin_writing
from tests.distributed.ranks import on_ranks, rank_info
from tests.workers import actor, update, weights


def save(worker: ActorWorker, folder: Path) -> None:
    worker.save(folder)
    await_written([folder], timeout_s=60)


def load_update_and_save(where: RankInfo, model: str, folder: Path) -> list[torch.Tensor]:
    """Return the loaded weights, and those after an update, which depends on the moments."""
    worker = actor(where, model)
    worker.load(folder / "one")
    found = [weights(worker)]
    update(worker)
    save(worker, folder / f"on-{where.world_size}")
    return [*found, weights(worker)]


def test_state_moves_from_one_rank_to_two_and_back(model: Path, tmp_path: Path) -> None:
    """Loading is bitwise on one rank; updates on two are those on one up to rounding."""
    first = actor(rank_info(), str(model))
    untrained = weights(first)
    update(first)
    begin_writing(tmp_path)
    first.save(tmp_path / "one")
    saved = weights(first)
    update(first)  # while the thread writes its copy of the state
    await_written([tmp_path / "one"], timeout_s=60)
    expected = weights(first)
    assert not torch.equal(untrained, saved)
    loaded, updated = load_update_and_save(rank_info(), str(model), tmp_path)
    assert torch.equal(loaded, saved)
    assert torch.equal(updated, expected)
    for loaded, updated in on_ranks(2, load_update_and_save, str(model), tmp_path):
        assert torch.equal(loaded, saved)
        assert (updated - expected).norm() <= 1e-5 * expected.norm()
    back = actor(rank_info(), str(model))
    back.load(tmp_path / "on-2")
    for worker in (first, back):
        update(worker)
    assert not torch.equal(weights(back), updated)
    assert (weights(back) - weights(first)).norm() <= 1e-5 * weights(first).norm()


def test_saving_before_the_first_update_changes_nothing(model: Path, tmp_path: Path) -> None:
    """Saving must not step a fresh optimizer to create its state, as torch's helper does."""
    plain, saved = actor(rank_info(), str(model)), actor(rank_info(), str(model))
    begin_writing(tmp_path)
    save(saved, tmp_path / "state")
    loaded = actor(rank_info(), str(model))
    loaded.load(tmp_path / "state")
    for worker in (plain, saved, loaded):
        update(worker)
    assert torch.equal(weights(plain), weights(saved))
    assert torch.equal(weights(plain), weights(loaded))


def test_random_state_is_restored(model: Path, tmp_path: Path) -> None:
    worker = actor(rank_info(), str(model))
    begin_writing(tmp_path)
    worker.save(tmp_path / "state")
    drawn = random.random(), float(np.random.random()), float(torch.rand(()))
    await_written([tmp_path / "state"], timeout_s=60)
    actor(rank_info(), str(model)).load(tmp_path / "state")
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == drawn
