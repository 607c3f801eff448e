"""Learning-rate schedules against those of transformers, and the counts that roles pass."""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.lr_schedule import Schedule
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.algorithms.sft import SFT
from rlctl.runtime.base.batch import LogProbs, Rollouts
from rlctl.runtime.base.roles import Roles
from tests.numerics.batches import scored_batch
from tests.settings import given

TOTAL = 12


def of_transformers(kind: str, warmup: int, min_ratio: float, cycles: float) -> list[float]:
    """Return the learning rate of each of TOTAL updates, the scheduler stepping after each."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    if kind == "constant":
        schedule = get_constant_schedule_with_warmup(optimizer, warmup)
    elif kind == "linear":
        schedule = get_linear_schedule_with_warmup(optimizer, warmup, TOTAL)
    elif min_ratio:
        schedule = get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, TOTAL, num_cycles=cycles, min_lr_rate=min_ratio
        )
    else:
        schedule = get_cosine_schedule_with_warmup(optimizer, warmup, TOTAL, num_cycles=cycles)
    used: list[float] = []
    for _ in range(TOTAL):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


@pytest.mark.parametrize("warmup", [0, 1, 5, TOTAL])
@pytest.mark.parametrize(
    ("kind", "min_ratio", "cycles"),
    [
        ("constant", 0.0, 0.5),
        ("linear", 0.0, 0.5),
        ("cosine", 0.0, 0.5),
        ("cosine", 0.1, 0.5),
        ("cosine", 0.0, 1.5),
    ],
)
def test_schedule_equals_that_of_transformers(
    kind: Literal["constant", "linear", "cosine"], min_ratio: float, cycles: float, warmup: int
) -> None:
    schedule = Schedule(2.0, TOTAL, warmup, kind, min_ratio, cycles)
    expected = of_transformers(kind, warmup, min_ratio, cycles)
    assert [schedule(count) for count in range(TOTAL)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_starts_at_the_peak_and_wastes_no_update(kind: Literal["linear", "cosine"]) -> None:
    schedule = Schedule(2.0, TOTAL, 0, kind, 0.1)
    assert schedule(0) == 2.0
    assert schedule(TOTAL - 1) > 0.2
    assert schedule(TOTAL) == pytest.approx(0.2)


class Recorder:
    """Actor and critic with constant outputs that record the learning rates of their updates."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def compute_log_probs(self, batch: Rollouts) -> LogProbs:
        return LogProbs(batch.rollout_log_probs, None)

    def compute_values(self, batch: Rollouts) -> Any:
        return batch.rollout_log_probs

    def update(
        self, batch: Rollouts, lr: float, max_probs_diff: float | None = None
    ) -> dict[str, Any]:
        assert max_probs_diff is None
        self.rates.append(lr)
        return {}


def rates(recipe: str, steps: list[int], *overrides: str) -> tuple[list[float], list[float]]:
    """Return the learning rates of actor and critic in `steps` of a run of 10."""
    sizes = given(train="[t]", model="m", batch=4, mini_batch=4)
    config = compose(recipe, [*sizes, *overrides]).config
    algorithm = (SFT if recipe.startswith("sft") else PPO).from_config(config, num_steps=10)
    actor, critic = Recorder(), Recorder()
    roles = Roles(cast(Any, actor), cast(Any, None), critic_role=cast(Any, critic))
    for step in steps:
        algorithm.learn(scored_batch(), roles, step)
    return actor.rates, critic.rates


WARM_UP = [
    f"{section}.optim.{key}"
    for section in ("actor_rollout_ref.actor", "critic")
    for key in ("lr=1.0", "lr_warmup_steps=4", "lr_scheduler_type=linear")
]


def test_actor_and_critic_count_their_own_updates() -> None:
    """The actor's 7 updates are those of the steps 4 to 10; a resumed run counts the same."""
    sizes = ["trainer.critic_warmup=3", "critic.ppo_mini_batch_size=4", *WARM_UP]
    actor, critic = rates("ppo_trainer", list(range(1, 11)), *sizes)
    assert actor == pytest.approx([0, 1 / 4, 2 / 4, 3 / 4, 1, 2 / 3, 1 / 3])
    assert critic == pytest.approx([0, 1 / 4, 2 / 4, 3 / 4, *(k / 6 for k in range(6, 0, -1))])
    assert rates("ppo_trainer", [6, 7], *sizes) == (actor[2:4], critic[5:7])


def test_critic_warmup_does_not_delay_an_actor_without_a_critic() -> None:
    overrides = ["trainer.critic_warmup=3", "actor_rollout_ref.actor.use_kl_loss=false", *WARM_UP]
    actor, _ = rates("grpo_trainer", [1, 2], *overrides)
    assert actor == pytest.approx([0, 1 / 4])


def test_sft_counts_its_updates() -> None:
    actor, _ = rates("sft_trainer", [1, 2, 5, 10], *WARM_UP[:3])
    assert actor == pytest.approx([0, 1 / 4, 1, 1 / 6])
