"""Groups of the schedule `eager`: admission, choice, age, and what a checkpoint keeps of them.

Below: order of generation, learning and weights, in the step and one step ahead.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import create_autospec

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes import schema
from rlctl.runtime import resume
from rlctl.runtime.algorithms.base import step_seed
from rlctl.runtime.base.batch import Prompts, Ragged, Rollouts, Scored
from rlctl.runtime.base.clock import Clock
from rlctl.runtime.base.roles import Generator, LostEnginesError, Published, Roles
from rlctl.runtime.training.checkpoint_store import ControllerState
from rlctl.runtime.training.eager import Eager
from rlctl.runtime.training.one_step_ahead import OneStepAhead, with_staleness
from rlctl.runtime.training.rollout_source import Collected, CollectionSetup, InStep, StreamState
from rlctl.runtime.workers.interrupts import INTERRUPTS
from tests.generation import respond
from tests.numerics.batches import scored_batch

SIZE = 3  # groups of a step
ROWS = 2  # responses of a group


class Loader:
    """Loader whose prompt number i has the single token i."""

    batch_size = SIZE

    def draw(self, position: int, count: int) -> list[int]:
        return list(range(position, position + count))

    def at(self, drawn: Sequence[int]) -> Prompts:
        rows = [PromptRow("source", [], None, extra_info={"number": i}) for i in drawn]
        ids = Ragged.from_rows([[i] for i in drawn], torch.int64)
        return Prompts(ids, torch.arange(len(drawn)), rows)


class Collector:
    """Collector that scores what the actor returns."""

    def __init__(self) -> None:
        self.loader = Loader()
        self.position = self.num_scored = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "num_scored": self.num_scored}

    def collect_drawn(
        self, drawn: Sequence[int], roles: Roles, step: int
    ) -> tuple[Scored, dict[str, float]]:
        roles.generator.update_weights()
        rollouts = roles.generator.generate_sequences(self.loader.at(drawn), seed=step)
        assert [row.extra_info["number"] for row in rollouts.rows[::ROWS]] == list(drawn)
        assert rollouts.group.tolist() == [i for i in range(len(drawn)) for _ in range(ROWS)]
        self.num_scored += 1
        zeros = torch.zeros(len(rollouts))
        return rollouts.grow(Scored, scores=zeros, components={}, failed=zeros.bool()), {}


@dataclass(eq=False)
class Open:
    """A group that was submitted and is not finished."""

    prompts: Prompts
    seed: int
    version: int  # of the engine when it began
    future: Future[Rollouts] = field(default_factory=Future)

    @property
    def number(self) -> int:
        return int(self.prompts.prompt_ids.values[0])


class Stream:
    """Stream whose groups finish by `finish`; `version` is that of the weights."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.player = SimpleNamespace(check_failures=lambda _: None)
        self.open: list[Open] = []
        self.submitted: list[int] = []
        self.version = 0

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        group = Open(prompts, seed, self.version)
        self.open.append(group)
        self.submitted.append(group.number)
        return group.future

    def finish(self, *numbers: int) -> None:
        for group in [each for each in self.open if each.number in numbers]:
            self.open.remove(group)
            group.future.set_result(written(group.prompts, group.version, self.version))


def written(prompts: Prompts, first: int, last: int) -> Rollouts:
    """Return two tokens for each response, by weights of these versions."""
    rows = prompts.repeat(ROWS)
    versions = Ragged.from_rows([[first, last]] * len(rows), torch.int64)
    return respond(rows, [[1, 2]] * len(rows), versions=versions)


class Run:
    """A source with its stream; the trainer's weights of step k have version 10·k."""

    def __init__(
        self,
        staleness: int,
        step: int = 0,
        state: StreamState | None = None,
        ahead: Collected | None = None,
    ) -> None:
        self.stream, self.collector, self.step = Stream(), Collector(), step
        reward = cast(Any, SimpleNamespace(state_dict=dict))
        roles = Roles(None, reward, generator_role=create_autospec(Generator, instance=True))
        clock, collector = Clock(lambda _: None), cast(Any, self.collector)
        collection = CollectionSetup(collector, roles, self.publish, clock, 100, ahead)
        stream = cast(Any, self.stream)
        self.source = Eager(
            collection, stream, seed=7, max_staleness=staleness, step=step, state=state
        )

    def publish(self) -> Published:
        self.stream.version = 10 * self.step
        return Published(self.stream.version, 2**30)

    def take(self) -> tuple[list[int], dict[str, float]]:
        """Return the numbers of the groups of the next step, and its metrics."""
        self.step += 1
        scored, metrics = self.source.take(self.step)
        return [row.extra_info["number"] for row in scored.rows[::ROWS]], metrics

    def learn(self) -> dict[str, float]:
        """End the step."""
        return self.source.end_step()


def test_groups_are_admitted_up_to_the_staleness() -> None:
    run = Run(staleness=2)
    assert run.stream.submitted == list(range(9))  # (2 + 0 + 1) steps
    assert run.collector.position == 9
    seeds = [(each.seed, int(each.prompts.group)) for each in run.stream.open]
    assert seeds == [(step_seed(7, 1 + i // SIZE), i % SIZE) for i in range(9)]
    run.stream.finish(0, 1, 2)
    assert run.take()[0] == [0, 1, 2]
    assert len(run.stream.submitted) == 9
    metrics = run.learn()
    assert run.stream.submitted == list(range(12))
    assert metrics["async/weight_sync_gb"] == 1.0


def test_groups_of_a_small_pool_of_prompts_fill_every_step() -> None:
    """A stateful sampler has at most as many prompts as the data."""
    run = Run(staleness=2)
    loader, draw = run.collector.loader, run.collector.loader.draw
    loader.draw = lambda position, count: [each % 4 for each in draw(position, min(count, 4))]
    run.stream.finish(*range(9))
    for step in range(1, 5):
        assert len(run.take()[0]) == SIZE
        run.learn()
        assert len(run.stream.submitted) == (step + 3) * SIZE
        run.stream.finish(*range(100))


def test_a_step_takes_the_oldest_finished_groups_and_waits_for_those_that_get_too_old() -> None:
    run = Run(staleness=1)
    run.stream.finish(5, 3, 0, 4)
    assert run.take()[0] == [0, 3, 4]
    run.learn()
    # 1, 2 and 5 were admitted before the first step: step 2 is the last that may learn from them.
    run.stream.finish(6, 7, 8)
    found = threading.Event()
    taken: list[int] = []

    def take() -> None:
        taken.extend(run.take()[0])
        found.set()

    threading.Thread(target=take, daemon=True).start()
    time.sleep(0.05)
    assert not found.is_set()
    run.stream.finish(1)
    time.sleep(0.05)
    assert not found.is_set()
    run.stream.finish(2)
    assert found.wait(60)
    assert taken == [1, 2, 5]


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_no_group_is_lost_or_learned_from_twice_or_too_old(staleness: int) -> None:
    """Finish groups in random order beside the trainer, and resume from checkpoints."""
    rng, run, learned = random.Random(staleness), Run(staleness), list[int]()
    engines = Engines(run.stream, rng)
    for _ in range(12):
        numbers, metrics = run.take()
        learned += numbers
        assert metrics["async/staleness/max"] <= staleness
        run.learn()
        if rng.random() < 0.4:
            engines.stop()
            run = resumed(run, staleness)
            engines = Engines(run.stream, rng)
    engines.stop()
    with run.source.quiet:
        rest = [group.record.number for group in run.source._groups]
        if (ahead := run.source.ahead) is not None:
            rest += [row.extra_info["number"] for row in ahead.scored.rows[::ROWS]]
    assert sorted(learned + rest) == list(range(run.collector.position))
    assert len(learned) == 12 * SIZE


class Engines:
    """Thread that finishes the groups of a stream in random order, a few at a time."""

    def __init__(self, stream: Stream, rng: random.Random) -> None:
        self.stream = stream
        self.rng = rng
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.stopping.wait(0.001):
            numbers = [each.number for each in self.stream.open]
            self.stream.finish(*self.rng.sample(numbers, min(len(numbers), 2)))

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join()


def resumed(run: Run, staleness: int) -> Run:
    """Return a run that starts from what a checkpoint of `run` has."""
    saved = run.source.state()
    state = saved.stream()
    assert state is not None
    again = StreamState.from_dict(state.to_dict(), state.finished_rollouts)
    return Run(staleness, run.step, again, saved.ahead)


def test_a_checkpoint_keeps_finished_groups_and_begins_open_ones_again() -> None:
    run = Run(staleness=2)
    run.stream.finish(0, 1, 2)
    run.take()
    run.learn()
    run.stream.finish(4, 7)
    again = resumed(run, 2)
    assert again.stream.submitted == [3, 5, 6, 8, 9, 10, 11]
    again.stream.finish(3)
    numbers, metrics = again.take()
    assert numbers == [3, 4, 7]
    # Groups 4 and 7 have a token by the initial weights; group 3 was generated again by those of 1.
    assert metrics["async/staleness/mean"] == pytest.approx(2 / 3)
    assert metrics["async/partial_responses"] == pytest.approx(2 / 3)


def test_state_of_a_step_does_not_wait_for_the_scores_of_the_next() -> None:
    run = Run(staleness=1)
    run.stream.finish(*range(6))
    scoring, gate = threading.Event(), threading.Event()
    collect = run.collector.collect_drawn

    def wait(*arguments: Any) -> Any:
        if run.collector.num_scored == 1:
            run.collector.num_scored += 1  # as a sampler changes halfway
            scoring.set()
            assert gate.wait(600)
        return collect(*arguments)

    cast(Any, run.collector).collect_drawn = wait
    run.take()
    assert scoring.wait(600)  # the groups of step 2 are being scored
    saved = run.source.state()
    gate.set()
    assert saved.ahead is None
    assert saved.loader == {"position": 6, "num_scored": 1}
    stream = saved.stream()
    assert stream is not None
    assert [group.number for group in stream.finished] == [3, 4, 5]


def test_rollouts_of_the_schedule_fixed_are_learned_from_first() -> None:
    scored = written(Loader().at([3, 4, 5]), 0, 0).grow(
        Scored, scores=torch.zeros(6), components={}, failed=torch.zeros(6).bool()
    )
    run = Run(1, step=1, ahead=Collected(2, 0, scored, {}))
    assert run.stream.submitted == [6, 7, 8]
    assert run.take()[0] == [3, 4, 5]
    run.learn()
    assert run.stream.submitted == list(range(6, 12))
    run.stream.finish(6, 7, 8)
    assert run.take()[0] == [6, 7, 8]


def test_smaller_batches_after_a_resume_lose_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(staleness=1)
    run.stream.finish(0, 1, 2)
    run.take()
    run.learn()
    monkeypatch.setattr(Loader, "batch_size", 1)
    again = resumed(run, 1)
    assert again.stream.submitted == [3, 4, 5, 6, 7, 8]
    again.stream.finish(*range(3, 9))
    taken: list[int] = []
    for _ in range(3):
        taken += again.take()[0]
        again.learn()
    assert taken == [3, 4, 5]


def test_an_error_of_the_stream_reaches_the_trainer() -> None:
    run = Run(staleness=1)
    run.stream.open[4].future.set_exception(RlctlError("no engine is left"))
    with pytest.raises(RlctlError, match="no engine is left"):
        run.take()


@pytest.mark.parametrize(("schedule", "staleness"), [("fixed", 1), ("eager", 0)])
def test_a_schedule_that_would_drop_groups_is_refused(schedule: str, staleness: int) -> None:
    groups = [{"number": i, "drawn": i, "version": 1} for i in range(3)]
    stream = {"num_admitted": 6, "open": groups[:1], "finished": groups[1:], "steps": []}
    state = ControllerState(2, "run", {}, 0, {}, stream=stream)
    asynchronous = schema.AsyncTraining(max_staleness=staleness, schedule=cast(Any, schedule))
    data = SimpleNamespace(train_batch_size=2)
    plan = SimpleNamespace(config=SimpleNamespace(async_training=asynchronous, data=data))
    with pytest.raises(ConfigError, match="has 3 prompts"):
        resume._check_schedule(cast(Any, plan), state)
    plan.config.async_training = schema.AsyncTraining(max_staleness=1, schedule="eager")
    resume._check_schedule(cast(Any, plan), state)
    data.train_batch_size = 1
    with pytest.raises(ConfigError, match="last of them would be 2 steps old") as error:
        resume._check_schedule(cast(Any, plan), state)
    assert error.value.problems[0].hint == "async_training.max_staleness=2 or more"


def rollouts(step: int) -> Scored:
    return replace(scored_batch(), finish=[f"rollouts {step}"] * 4)


class Log:
    """Collector and roles that note each call; the weights are the last step that learned."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights = self.published = self.drawn = 0
        self.fail_at, self.error = 0, RlctlError("no engine is left")
        self.gate: threading.Event | None = None  # generation waits for it

    def publish_weights(self) -> Published:
        self.published = self.weights
        return Published(self.weights, 2**29)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        assert step > 0
        self.drawn = state["drawn"]

    def collect(self, roles: Roles, step: int) -> tuple[Any, dict[str, float]]:
        del roles
        self.drawn += 1
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


def test_a_stop_gives_up_rollouts_that_come_too_late() -> None:
    log = Log()
    source = ahead(log, beside=True)
    source.take(1)
    log.learn(1)
    source.end_step()
    log.gate = threading.Event()
    source.take(2)
    log.learn(2)
    INTERRUPTS.expire()  # what `Stopping` does at its deadline
    try:
        assert "async/trainer_idle" in source.end_step()
    finally:
        INTERRUPTS.reset()
    assert source.state().ahead is None
    assert source.state().loader == {"drawn": 2}  # the prompts of step 3 are drawn again
    log.gate.set()


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
    assert log.drawn == 4, "the prompts of a lost collection are drawn again"


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
