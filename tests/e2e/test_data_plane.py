"""Steps on Ray whose per-token values stay with the workers equal those of values sent along."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import rlctl
from rlctl.runtime.batch import Rollouts, Scores
from rlctl.runtime.batch.stored import is_stored
from rlctl.runtime.cluster import group, pool
from rlctl.tracking.metrics import to_floats
from rlctl.workers import ResourcePool, make_plan, session, spawn_roles
from tests.warm_workers import warm_workers

SETTINGS = [
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "data.max_response_length=6",
    "trainer.n_gpus_per_node=2",
    "trainer.num_threads=1",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
]


class LengthReward:
    """Reward of what the controller knows: the lengths."""

    def compute_scores(self, rollouts: Rollouts, validate: bool = False) -> Scores:
        del validate
        lengths = rollouts.response_ids.lengths
        scores = ((lengths + torch.arange(len(lengths))) % 3).float()
        return Scores(scores, {}, torch.zeros(len(lengths), dtype=torch.bool))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with warm_workers(), session(num_cpus=2):
        yield


def two_steps() -> tuple[list[dict[str, float]], list[float]]:
    """Return the metrics of two PPO steps on two ranks, and the log-probs after them."""
    plan = make_plan(rlctl.compose("ppo", SETTINGS))
    metrics = list[dict[str, float]]()
    with ResourcePool(2, seed=3) as ranks:
        roles = spawn_roles(plan, {"main": ranks}, LengthReward())
        for step in (1, 2):
            scored = plan.algorithm.collect(plan.loader.batch_at(step), roles, step)
            assert is_stored(scored) == (group.INLINE_BYTES == 0)
            metrics.append(to_floats(plan.algorithm.learn(scored, roles, step)))
        after = roles.actor.compute_log_probs(scored).log_probs.values
    return metrics, after.tolist()


@pytest.mark.slow
@pytest.mark.soak
def test_values_that_stay_with_the_workers_give_the_same_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, log_probs = two_steps()
    monkeypatch.setattr(group, "INLINE_BYTES", 0)
    monkeypatch.setattr(pool, "RANKS_PER_RELAY", 1)
    stored, own = two_steps()
    for one, other in zip(sent, stored, strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)
    assert own == pytest.approx(log_probs, rel=1e-6, abs=1e-7)
