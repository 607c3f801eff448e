"""Weights that engines get from the trainer in mid-response: `schedule=eager`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from rlctl.runs.engine_requests import EngineRequest, PoolStatus, send
from rlctl.runtime.base.batch import Rollouts
from rlctl.runtime.base.roles import LostEnginesError
from rlctl.runtime.cluster import membership
from rlctl.runtime.cluster.pool_engine import Engine
from rlctl.runtime.generation.separate_engines import SeparateEngines
from rlctl.runtime.rollout.engine import in_order, to_requests, to_responses
from rlctl.runtime.rollout.requests import Completion, Slice
from rlctl.runtime.rollout.sampling_params import to_rollouts
from tests.distributed.test_engines import (  # noqa: F401
    Stage,
    assert_current,
    config,
    engine_processes,
    experience,
    folder,
    prompts,
    ray,
    shared_stage,
    stage,
    through,
)

STEPS = Slice(steps=3)


class Turns:
    """Responses to the usual prompts, in slices of engine steps."""

    def __init__(self, stage: Stage, generator: SeparateEngines, seed: int) -> None:  # noqa: F811
        self.generator, self.sampling = generator, stage.trainer.spec.sampling
        params = self.sampling.params(prompts().group, seed, False, False, None)
        requests = to_requests(prompts().prompt_ids, params, 60)
        self.requests = [replace(request, affinity=-1) for request in requests]
        self.waiting, self.completions = self.requests, list[Completion]()

    def advance(self) -> None:
        """Let the engines make some steps."""
        self.completions += self.generator.exchange(self.waiting, STEPS)
        self.waiting = []

    def finish(self) -> Rollouts:
        """Let the engines finish, and return the responses."""
        deadline = time.monotonic() + 300
        while len(self.completions) < 3 * len(self.requests):
            self.advance()
            assert time.monotonic() < deadline
        rows = in_order(self.requests, self.completions)
        return to_rollouts(prompts(), 3, to_responses(rows))


@pytest.fixture
def generator(stage: Stage) -> Iterator[SeparateEngines]:  # noqa: F811
    """Return the engines of an eager run, whose two engines are ready and have its weights."""
    before = stage.trainer.before_change
    generator = SeparateEngines(stage.trainer, stage.engines, in_flight=True)
    stage.engines.mark_stale()
    generator.publish_weights()
    wait_until(generator, lambda: all(engine.ready for engine in engines(stage)))
    generator.publish_weights()
    stage.events.clear()
    yield generator
    stage.trainer.before_change = before
    stage.engines.awaits_broadcast = False
    stage.engines.mark_stale()


def engines(stage: Stage) -> list[Engine]:  # noqa: F811
    return stage.pool.engines.engines


def wait_until(generator: SeparateEngines, condition: Callable[[], bool]) -> None:
    """Exchange without requests until `condition` holds."""
    deadline = time.monotonic() + 300
    while not condition():
        generator.exchange([], STEPS)
        assert time.monotonic() < deadline


def learn(stage: Stage, generator: SeparateEngines) -> None:  # noqa: F811
    """Change the trainer's weights."""
    rollouts = Turns(stage, generator, seed=9).finish()
    stage.trainer.update(experience(rollouts, rollouts.rollout_log_probs), lr=1e-2)


def check_generation(stage: Stage, generator: SeparateEngines) -> None:  # noqa: F811
    """Check that new responses are those of the trainer's weights."""
    rollouts = Turns(stage, generator, seed=5).finish()
    assert_current(stage, rollouts)


@pytest.mark.parametrize("backend", ["object_store", "auto"])
def test_open_responses_continue_under_the_new_weights(
    stage: Stage,  # noqa: F811
    generator: SeparateEngines,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    through(stage, backend, monkeypatch)
    before = stage.trainer.learner.num_updates
    learn(stage, generator)
    turns = Turns(stage, generator, seed=4)
    turns.advance()  # beside the trainer, under the published weights
    published = generator.publish_weights()
    assert (published.version, published.num_bytes > 1000) == (before + 1, True)
    turns.finish()
    spans = {completion.spans for completion in turns.completions}
    assert ((before, 4), (before + 1, 8)) in spans  # three steps and the first token
    assert all(span[-1][0] == before + 1 for span in spans if sum(n for _, n in span) > 4)
    check_generation(stage, generator)
    assert stage.events == []


@pytest.mark.parametrize("what", ["fall", pytest.param("freeze", marks=pytest.mark.soak)])
def test_engine_lost_in_a_broadcast_is_left_out_until_the_next(
    stage: Stage,  # noqa: F811
    generator: SeparateEngines,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one has the weights at once; open responses of the lost one move to it."""
    learn(stage, generator)
    turns = Turns(stage, generator, seed=4)
    turns.advance()
    stage.request(what)
    with monkeypatch.context() as patch:
        if what == "freeze":
            late = replace(stage.pool.engines.spec, call_timeout_s=20.0)
            patch.setattr(stage.pool.engines, "spec", late)
        generator.publish_weights()
    assert stage.kinds() == ["engine_lost"]
    assert ("did not load its weights within 5 s" in stage.events[0][1]["reason"]) == (
        what == "freeze"
    )
    assert stage.events[0][1]["requests"] > 0
    assert [engine.version for engine in engines(stage) if engine.ready] == [stage.engines.version]
    turns.finish()
    learn(stage, generator)  # the trainer has no published weights any more
    wait_until(generator, lambda: all(engine.ready for engine in engines(stage)))
    for _ in range(5):
        generator.exchange([], STEPS)
    assert sorted(engine.version for engine in engines(stage)) == [-1, stage.engines.version]
    generator.publish_weights()
    assert {engine.version for engine in engines(stage)} == {stage.engines.version}
    check_generation(stage, generator)
    assert stage.kinds() == ["engine_lost", "engine_restarted"]


def test_restarted_engines_get_the_weights_that_the_trainer_still_has(
    stage: Stage,  # noqa: F811
    generator: SeparateEngines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All engines are killed, while the trainer waits for responses, and once it has learned."""
    turns = Turns(stage, generator, seed=4)
    turns.advance()
    for process in engine_processes(stage.folder):
        process.kill()
    turns.finish()
    assert stage.kinds().count("engine_lost") == 2
    learn(stage, generator)
    stage.events.clear()
    turns = Turns(stage, generator, seed=5)
    turns.advance()
    for process in engine_processes(stage.folder):
        process.kill()
    wait_until(generator, lambda: stage.kinds().count("engine_restarted") == 2)
    with monkeypatch.context() as patch:
        patch.setattr(stage.pool.engines, "restart_timeout_s", 0.5)
        time.sleep(1)
        turns.advance()  # they wait for longer than a restart may take
    assert {engine.version for engine in engines(stage)} == {-1}
    generator.publish_weights()
    turns.finish()
    check_generation(stage, generator)


def test_responses_one_step_ahead_fail_if_all_engines_are_lost_while_the_trainer_learns(
    stage: Stage,  # noqa: F811
    generator: SeparateEngines,
) -> None:
    """They are generated again once the next weights are published."""
    generator.in_flight = False
    rollouts = generator.generate_sequences(prompts(), seed=3)
    stage.trainer.update(experience(rollouts, rollouts.rollout_log_probs), lr=1e-2)
    for process in engine_processes(stage.folder):
        process.kill()
    with pytest.raises(LostEnginesError, match="no rollout engine with the weights of this step"):
        generator.generate_sequences(prompts(), seed=4)
    with pytest.raises(LostEnginesError):
        Turns(stage, generator, seed=4).finish()
    generator.publish_weights()
    again = generator.generate_sequences(prompts(), seed=4)
    assert_current(stage, again)
    assert stage.kinds().count("engine_lost") == 2


def test_engines_join_and_leave_between_broadcasts(
    stage: Stage,  # noqa: F811
    generator: SeparateEngines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "_POLL_S", 0.1)

    def is_done(request: EngineRequest) -> bool:
        status = PoolStatus.read(stage.folder)
        found = status and status.request(request.id)
        return found is not None and found.progress == "done"

    first = min(engine.number for engine in engines(stage))
    learn(stage, generator)
    turns = Turns(stage, generator, seed=4)
    turns.advance()
    add, drain = EngineRequest("add", count=1), EngineRequest("drain", engines=[first])
    send(stage.folder, add)
    send(stage.folder, drain)
    deadline = time.monotonic() + 60
    while not any(engine.draining for engine in engines(stage)) and time.monotonic() < deadline:
        time.sleep(0.05)
    generator.publish_weights()  # the draining engine has open responses
    turns.finish()
    wait_until(generator, lambda: is_done(add) and is_done(drain))
    learn(stage, generator)
    generator.publish_weights()
    numbers = [engine.number for engine in engines(stage)]
    assert (len(numbers), first in numbers) == (2, False)
    assert {engine.version for engine in engines(stage)} == {stage.engines.version}
    check_generation(stage, generator)
    assert "engine_lost" not in stage.kinds()
