"""Saved worker state loads bitwise on as many ranks, else up to rounding; averages of weights."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.average import Average
from rlctl.runtime.model.sharding import full_tensor
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.background import await_written, begin_writing
from rlctl.runtime.workers.dispatch import split
from tests.distributed.ranks import on_ranks, rank_info
from tests.tolerance import PASSES, assert_as_exact, float64
from tests.workers import actor, experience, save, update, weights


def load_update_and_save(where: RankInfo, model: str, folder: Path) -> list[torch.Tensor]:
    """Return the loaded weights, and those after an update, which depends on the moments."""
    worker = actor(where, model)
    worker.load(folder / "one")
    found = [weights(worker)]
    update(worker)
    save(worker, folder / f"on-{where.world_size}")
    return [*found, weights(worker)]


def exact_weights(model: Path, num_updates: int) -> list[Tensor]:
    """Return the weights after each update in float64."""
    with float64():
        worker, found = actor(rank_info(), str(model), PASSES), list[Tensor]()
        for _ in range(num_updates):
            update(worker)
            found.append(weights(worker))
    return found


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
    exact = exact_weights(model, num_updates=3)
    loaded, updated = load_update_and_save(rank_info(), str(model), tmp_path)
    assert torch.equal(loaded, saved)
    assert torch.equal(updated, expected)
    for loaded, updated in on_ranks(2, load_update_and_save, str(model), tmp_path):
        assert torch.equal(loaded, saved)
        assert_as_exact(updated, expected, exact[1])
    back = actor(rank_info(), str(model))
    back.load(tmp_path / "on-2")
    for worker in (first, back):
        update(worker)
    assert not torch.equal(weights(back), updated)
    assert_as_exact(weights(back), weights(first), exact[2])


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


DECAYS = (0.5, 0.75)


def averaging(
    where: RankInfo, model: str, overrides: tuple[str, ...] = ()
) -> tuple[ActorWorker, Average]:
    worker = actor(where, model, overrides)
    worker.learner.average = Average(worker.policy)
    return worker, worker.learner.average


def averaged_weights(worker: ActorWorker, average: Average) -> Tensor:
    with average.in_place_of_weights():
        return weights(worker)


def scores(worker: ActorWorker, *, averaged: bool) -> Tensor:
    """Return the log-probs of this rank's rows."""
    batch, info = experience(), worker.rank_info
    own = batch.chunk(split(batch, info.world_size, balanced=False))[info.rank]
    if averaged:
        return worker.compute_log_probs(own, "average").log_probs.values
    return worker.compute_log_probs(own).log_probs.values


def follow(where: RankInfo, model: str, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Train, average and save; load into a fresh worker, and train both.

    Returns the weights and their average after each step, those of the fresh worker last.
    """
    worker, average = averaging(where, model)
    steps, averages = [weights(worker)], [averaged_weights(worker, average)]
    before = scores(worker, averaged=False)
    for decay in DECAYS:
        update(worker)
        worker.update_average(decay)
        steps.append(weights(worker))
        averages.append(averaged_weights(worker, average))
    assert torch.equal(weights(worker), steps[-1])  # swapping leaves no trace
    now, mean = scores(worker, averaged=False), scores(worker, averaged=True)
    assert torch.equal(scores(worker, averaged=False), now)
    assert (mean - before).norm() < (now - before).norm()
    assert (mean - before).norm() > 0
    save(worker, folder)
    fresh, restored = averaging(where, model)
    fresh.load(folder)
    assert torch.equal(scores(fresh, averaged=True), mean)
    for each, its_average in ((worker, average), (fresh, restored)):
        update(each)
        each.update_average(DECAYS[0])
        averages.append(averaged_weights(each, its_average))
    return steps, averages


def half_average(where: RankInfo, model: str) -> float:
    """Return the change of the average after 40 steps towards weights of bfloat16 that differ."""
    half = ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",)
    worker, average = averaging(where, model, half)
    update(worker)
    now = weights(worker)
    name, value = next(iter(average.values.items()))
    start = full_tensor(value).clone()
    for _ in range(40):
        worker.update_average(0.999)
    before = averaged_weights(worker, average)
    assert before.dtype == torch.bfloat16
    assert torch.equal(weights(worker), now)
    whole = full_tensor(worker.policy.get_parameter(name)).float() - start
    return float((full_tensor(value) - start).norm() / whole.norm())


def on_both_ranks(
    where: RankInfo, model: str, folder: Path
) -> tuple[tuple[list[Tensor], list[Tensor]], float]:
    return follow(where, model, folder), half_average(where, model)


@pytest.mark.soak
def test_the_average_equals_a_loop_and_is_restored(model: Path, tmp_path: Path) -> None:
    """Also of bfloat16 weights, whose average is float32."""
    begin_writing(tmp_path)
    ranks = on_ranks(2, on_both_ranks, str(model), tmp_path / "two")
    assert [share for _, share in ranks] == pytest.approx([1 - 0.999**40] * 2, rel=1e-2)
    alone = follow(rank_info(), str(model), tmp_path / "one")
    for steps, averages in (alone, *(result for result, _ in ranks)):
        expected = steps[0]
        exact = expected.double()
        assert torch.equal(averages[0], expected)
        for decay, step, average in zip(DECAYS, steps[1:], averages[1:], strict=False):
            expected = decay * expected + (1 - decay) * step
            exact = decay * exact + (1 - decay) * step.double()
            assert_as_exact(average, expected, exact)
        assert torch.equal(averages[-1], averages[-2])


def test_a_checkpoint_without_an_average_starts_one(model: Path, tmp_path: Path) -> None:
    begin_writing(tmp_path)
    one = actor(rank_info(), model)
    update(one)
    save(one, tmp_path / "state")
    worker, average = averaging(rank_info(), str(model))
    worker.load(tmp_path / "state")
    assert torch.equal(averaged_weights(worker, average), weights(one))
