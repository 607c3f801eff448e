"""Weights that engines get from the trainer in mid-response: `schedule=eager`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from rlctl.runs.engines import EngineRequest, PoolStatus, send
from rlctl.runtime.batch import Rollouts
from rlctl.runtime.cluster import membership
from rlctl.runtime.cluster.disaggregated import DisaggregatedActor
from rlctl.runtime.cluster.engines import Engine
from rlctl.runtime.roles import LostEnginesError
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

    def __init__(self, stage: Stage, actor: DisaggregatedActor, seed: int) -> None:  # noqa: F811
        self.actor, self.sampling = actor, stage.trainer.spec.sampling
        params = self.sampling.params(prompts().group, seed, False, False, None)
        requests = to_requests(prompts().prompt_ids, params, 60)
        self.requests = [replace(request, affinity=-1) for request in requests]
        self.waiting, self.completions = self.requests, list[Completion]()

    def advance(self) -> None:
        """Let the engines make some steps."""
        self.completions += self.actor.exchange(self.waiting, STEPS)
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
def actor(stage: Stage) -> Iterator[DisaggregatedActor]:  # noqa: F811
    """Return the actor of an eager run, whose two engines are ready and have its weights."""
    actor = DisaggregatedActor(stage.trainer, stage.engines, in_flight=True)
    stage.engines.mark_stale()
    actor.publish_weights()
    wait_until(actor, lambda: all(engine.ready for engine in engines(stage)))
    actor.publish_weights()
    stage.events.clear()
    yield actor
    stage.engines.awaits_broadcast = False
    stage.engines.mark_stale()


def engines(stage: Stage) -> list[Engine]:  # noqa: F811
    return stage.pool.engines.engines


def wait_until(actor: DisaggregatedActor, condition: Callable[[], bool]) -> None:
    """Exchange without requests until `condition` holds."""
    deadline = time.monotonic() + 300
    while not condition():
        actor.exchange([], STEPS)
        assert time.monotonic() < deadline


def learn(stage: Stage, actor: DisaggregatedActor) -> None:  # noqa: F811
    """Change the trainer's weights."""
    rollouts = Turns(stage, actor, seed=9).finish()
    actor.update(experience(rollouts, rollouts.rollout_log_probs), lr=1e-2)


def check_generation(stage: Stage, actor: DisaggregatedActor) -> None:  # noqa: F811
    """Check that new responses are those of the trainer's weights."""
    rollouts = Turns(stage, actor, seed=5).finish()
    assert_current(stage, rollouts)


@pytest.mark.parametrize("backend", ["object_store", "auto"])
def test_open_responses_continue_under_the_new_weights(
    stage: Stage,  # noqa: F811
    actor: DisaggregatedActor,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    through(stage, backend, monkeypatch)
    before = stage.trainer.learner.num_updates
    learn(stage, actor)
    turns = Turns(stage, actor, seed=4)
    turns.advance()  # beside the trainer, under the published weights
    published = actor.publish_weights()
    assert (published.version, published.num_bytes > 1000) == (before + 1, True)
    turns.finish()
    spans = {completion.spans for completion in turns.completions}
    assert ((before, 4), (before + 1, 8)) in spans  # three steps and the first token
    assert all(span[-1][0] == before + 1 for span in spans if sum(n for _, n in span) > 4)
    check_generation(stage, actor)
    assert stage.events == []


@pytest.mark.parametrize("what", ["fall", pytest.param("freeze", marks=pytest.mark.soak)])
def test_engine_lost_in_a_broadcast_is_left_out_until_the_next(
    stage: Stage,  # noqa: F811
    actor: DisaggregatedActor,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one has the weights at once; open responses of the lost one move to it."""
    learn(stage, actor)
    turns = Turns(stage, actor, seed=4)
    turns.advance()
    stage.request(what)
    with monkeypatch.context() as patch:
        if what == "freeze":
            late = replace(stage.pool.engines.spec, call_timeout_s=20.0)
            patch.setattr(stage.pool.engines, "spec", late)
        actor.publish_weights()
    assert stage.kinds() == ["engine_lost"]
    assert ("did not load its weights within 5 s" in stage.events[0][1]["reason"]) == (
        what == "freeze"
    )
    assert stage.events[0][1]["requests"] > 0
    assert [engine.version for engine in engines(stage) if engine.ready] == [stage.engines.version]
    turns.finish()
    learn(stage, actor)  # the trainer has no published weights any more
    wait_until(actor, lambda: all(engine.ready for engine in engines(stage)))
    for _ in range(5):
        actor.exchange([], STEPS)
    assert sorted(engine.version for engine in engines(stage)) == [-1, stage.engines.version]
    actor.publish_weights()
    assert {engine.version for engine in engines(stage)} == {stage.engines.version}
    check_generation(stage, actor)
    assert stage.kinds() == ["engine_lost", "engine_restarted"]


def test_restarted_engines_get_the_weights_that_the_trainer_still_has(
    stage: Stage,  # noqa: F811
    actor: DisaggregatedActor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All engines are killed, while the trainer waits for responses, and once it has learned."""
    turns = Turns(stage, actor, seed=4)
    turns.advance()
    for process in engine_processes(stage.folder):
        process.kill()
    turns.finish()
    assert stage.kinds().count("engine_lost") == 2
    learn(stage, actor)
    stage.events.clear()
    turns = Turns(stage, actor, seed=5)
    turns.advance()
    for process in engine_processes(stage.folder):
        process.kill()
    wait_until(actor, lambda: stage.kinds().count("engine_restarted") == 2)
    with monkeypatch.context() as patch:
        patch.setattr(stage.pool.engines, "restart_timeout_s", 0.5)
        time.sleep(1)
        turns.advance()  # they wait for longer than a restart may take
    assert {engine.version for engine in engines(stage)} == {-1}
    actor.publish_weights()
    turns.finish()
    check_generation(stage, actor)


def test_responses_one_step_ahead_fail_if_all_engines_are_lost_while_the_trainer_learns(
    stage: Stage,  # noqa: F811
    actor: DisaggregatedActor,
) -> None:
    """They are generated again once the next weights are published."""
    actor.in_flight = False
    rollouts = actor.generate_sequences(prompts(), seed=3)
    actor.update(experience(rollouts, rollouts.rollout_log_probs), lr=1e-2)
    for process in engine_processes(stage.folder):
        process.kill()
    with pytest.raises(LostEnginesError, match="no rollout engine with the weights of this step"):
        actor.generate_sequences(prompts(), seed=4)
    with pytest.raises(LostEnginesError):
        Turns(stage, actor, seed=4).finish()
    actor.publish_weights()
    again = actor.generate_sequences(prompts(), seed=4)
    assert_current(stage, again)
    assert stage.kinds().count("engine_lost") == 2


def test_engines_join_and_leave_between_broadcasts(
    stage: Stage,  # noqa: F811
    actor: DisaggregatedActor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "_POLL_S", 0.1)

    def is_done(request: EngineRequest) -> bool:
        status = PoolStatus.read(stage.folder)
        found = status and status.request(request.id)
        return found is not None and found.progress == "done"

    first = min(engine.number for engine in engines(stage))
    learn(stage, actor)
    turns = Turns(stage, actor, seed=4)
    turns.advance()
    add, drain = EngineRequest("add", count=1), EngineRequest("drain", engines=[first])
    send(stage.folder, add)
    send(stage.folder, drain)
    deadline = time.monotonic() + 60
    while not any(engine.draining for engine in engines(stage)) and time.monotonic() < deadline:
        time.sleep(0.05)
    actor.publish_weights()  # the draining engine has open responses
    turns.finish()
    wait_until(actor, lambda: is_done(add) and is_done(drain))
    learn(stage, actor)
    actor.publish_weights()
    numbers = [engine.number for engine in engines(stage)]
    assert (len(numbers), first in numbers) == (2, False)
    assert {engine.version for engine in engines(stage)} == {stage.engines.version}
    check_generation(stage, actor)
    assert "engine_lost" not in stage.kinds()
