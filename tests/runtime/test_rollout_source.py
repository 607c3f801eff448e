"""Order of generation, learning and weights, in the step and one step ahead."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.runtime.batch import Scored
from rlctl.runtime.roles import LostEnginesError, Published, Roles
from rlctl.runtime.training.rollout_source import (
    Collected,
    CollectionSetup,
    InStep,
    OneStepAhead,
    with_staleness,
)
from rlctl.tracking.clock import Clock
from tests.numerics.batches import scored_batch


def rollouts(step: int) -> Scored:
    return replace(scored_batch(), finish=[f"rollouts {step}"] * 4)


class Log:
    """Collector and roles that note each call; the weights are the last step that learned."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights = self.published = 0
        self.fail_at, self.error = 0, RlctlError("no engine is left")
        self.gate: threading.Event | None = None  # generation waits for it

    def publish_weights(self) -> Published:
        self.published = self.weights
        return Published(self.weights, 2**29)

    def collect(self, roles: Roles, step: int) -> tuple[Any, dict[str, float]]:
        del roles
        weights = self.published
        if self.gate is not None:
            assert self.gate.wait(600)
        if step == self.fail_at:
            raise self.error
        self.calls.append(f"{step} by {weights}")
        return rollouts(step), {}

    def learn(self, step: int) -> None:
        self.calls.append(f"learn {step}")
        self.weights = step


def ahead(
    log: Log, *, beside: bool = False, last: int = 4, start: Collected | None = None
) -> OneStepAhead:
    each, clock = cast(Any, log), Clock(lambda _: None)
    collection = CollectionSetup(each, Roles(each, each), log.publish_weights, clock, last, start)
    return OneStepAhead(collection, in_thread=beside)


def run(log: Log, source: Any, first: int, last: int) -> list[float]:
    """Return the staleness of each step."""
    staleness: list[float] = []
    for step in range(first, last + 1):
        scored, metrics = source.take(step)
        assert scored.finish == [f"rollouts {step}"] * 4
        staleness.append(metrics.get("async/staleness/mean", 0.0))
        log.learn(step)
        source.end_step()
    return staleness


@pytest.mark.parametrize("beside", [False, True])
def test_rollouts_are_generated_under_the_weights_before_the_step_that_learns(beside: bool) -> None:
    log = Log()
    assert run(log, ahead(log, beside=beside), 1, 4) == [0.0, 1.0, 1.0, 1.0]
    generated = [call for call in log.calls if not call.startswith("learn")]
    assert generated == ["1 by 0", "2 by 0", "3 by 1", "4 by 2"]


def test_generation_runs_beside_learning() -> None:
    log = Log()
    source = ahead(log, beside=True)
    source.take(1)
    log.gate = threading.Event()
    log.learn(1)
    source.end_step()
    source.take(2)
    log.learn(2)  # while the rollouts of step 3 wait for the gate
    log.gate.set()
    metrics = source.end_step()
    assert log.calls[-2:] == ["learn 2", "3 by 1"]
    assert 0 <= metrics["async/trainer_idle"] <= 1
    assert 0 <= metrics["async/engines_idle"] <= 1
    assert metrics["async/weight_sync_gb"] == 0.5


class Syncing(Log):
    """Collector whose engines load weights."""

    clock: Clock

    def collect(self, roles: Roles, step: int) -> tuple[Any, dict[str, float]]:
        with self.clock.phase("update_weights"):
            return super().collect(roles, step)


def test_seconds_are_those_of_the_collection_beside_the_step() -> None:
    log = Syncing()
    source = ahead(log, last=2)
    log.clock = source.clock
    source.take(1)
    assert source.seconds.keys() == {"sync_weights"}
    assert source.collection.clock.take().keys() == {"wait_rollouts"}
    log.learn(1)
    assert source.end_step()["async/trainer_idle"] > 0
    source.take(2)
    assert source.seconds == {}, "nothing is generated beside the last step"
    assert source.end_step()["async/engines_idle"] == 1


def test_resumed_schedule_is_the_uninterrupted_one() -> None:
    whole, first, second = Log(), Log(), Log()
    run(whole, ahead(whole), 1, 4)
    before = ahead(first, last=3)
    run(first, before, 1, 2)
    assert before.ahead is not None
    second.weights = 2
    after = ahead(second, start=before.ahead)
    assert run(second, after, 3, 4) == [1.0, 1.0]
    assert [*first.calls, *second.calls] == whole.calls


def test_failed_generation_raises_at_the_end_of_the_step_beside_it() -> None:
    log = Log()
    log.fail_at = 2
    source = ahead(log, beside=True)
    source.take(1)
    log.learn(1)
    with pytest.raises(RlctlError, match="no engine is left"):
        source.end_step()


def test_rollouts_whose_engines_were_all_lost_are_collected_in_their_own_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log()
    log.fail_at, log.error = 2, LostEnginesError("no engine has the weights")
    source = ahead(log, beside=True)
    source.take(1)
    log.learn(1)
    source.end_step()
    assert caplog.messages == ["no engine has the weights; rollouts are collected in their step"]
    log.fail_at = 0
    assert run(log, source, 2, 4) == [0.0, 1.0, 1.0]
    generated = [call for call in log.calls if not call.startswith("learn")]
    assert generated == ["1 by 0", "2 by 1", "3 by 1", "4 by 2"]


def test_rollouts_in_a_checkpoint_are_learned_from_when_the_run_stays_in_step() -> None:
    log = Log()
    left = Collected(3, 1, rollouts(3), {})
    source = InStep(cast(Any, log), cast(Any, log), left)
    run(log, source, 3, 4)
    assert log.calls == ["learn 3", "4 by 0", "learn 4"]


def test_tokens_have_a_staleness_and_rows_that_of_their_oldest_sampled_token() -> None:
    """The mask of the last row's second token excludes it: the policy did not write it."""
    scored = scored_batch()  # rows of 3, 2, 1 and 3 tokens
    mask = torch.ones(9)
    mask[7] = 0
    scored = replace(scored, response_mask=scored.response_mask.like(mask))
    weights = torch.tensor([4, 3, 4, 1, 1, 4, 4, 0, 3])
    aged, metrics = with_staleness(scored, 5, weights, limit=4)
    assert [row.tolist() for row in aged.staleness.rows()] == [[0, 1, 0], [3, 3], [0], [0, 4, 1]]
    assert metrics == {
        "async/staleness/mean": 1.25,
        "async/staleness/max": 3.0,
        "async/staleness/share/0": 0.25,
        "async/staleness/share/1": 0.5,
        "async/staleness/share/2": 0.0,
        "async/staleness/share/3": 0.25,
        "async/staleness/share/4": 0.0,
    }
