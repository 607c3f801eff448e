"""Weights that engines load one after the other while others generate, without Ray.

The group of fakes is that of test_engine_group.py; a fake ends its loads and turns when the test
asks for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from rlctl.errors import RlctlError
from rlctl.runtime.cluster import live_engines, rolling
from rlctl.runtime.cluster.channels import PublishedWeights
from rlctl.runtime.rollout.requests import Completion, Request, Slice
from tests.runtime.test_engine_group import Ref, Setup, completed, no_ray, turns  # noqa: F401

SLICE = Slice(None, 0.02)


@pytest.fixture(autouse=True)
def waits(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> list[float]:  # noqa: F811
    """Return the seconds of each wait, with Ray and time replaced."""
    seconds: list[float] = []
    plain = rolling.RollingUpdate.wait

    def wait(update: rolling.RollingUpdate, limit: float) -> None:
        seconds.append(limit)
        plain(update, limit)

    monkeypatch.setattr(live_engines, "_POLL_S", 0.001)
    monkeypatch.setattr(rolling.RollingUpdate, "wait", wait)
    return seconds


@dataclass(eq=False)
class Fake:
    """Engine process whose loads wait for `loaded`, unless they end at once."""

    loads: list[Ref] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the loads
    buckets: list[list[str]] = field(default_factory=list)  # of the loads
    begun: list[int] = field(default_factory=list)  # keys
    cancelled: list[int] = field(default_factory=list)
    num_exchanges: int = 0
    open: list[Request] = field(default_factory=list)
    finishes: bool = False  # all open requests, in each exchange
    loads_at_once: bool = False

    def __call__(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "load_stored":
            self.versions.append(args[1])
            self.buckets.append(args[0])
            self.loads.append(Ref(0.5, hangs=not self.loads_at_once))
            return self.loads[-1]
        if method == "exchange":
            return self.exchange(*args)
        return None

    def exchange(self, new: list[Request], limit: Slice, cancelled: list[int]) -> Any:
        assert limit is SLICE
        assert not self.loads or not self.loads[-1].hangs, "exchange with an engine that loads"
        self.num_exchanges += 1
        self.begun += [each.key for each in new]
        self.cancelled += cancelled
        self.open = [each for each in [*self.open, *new] if each.key not in cancelled]
        done, self.open = (self.open, []) if self.finishes else ([], self.open)
        return completed(done)

    def loaded(self, result: Any = 0.5) -> None:
        """End the load that is under way."""
        self.loads[-1].value, self.loads[-1].hangs = result, False


class Rolling(Setup):
    """Group of fakes that have published weights of version 10 from the start."""

    def __init__(self, *fakes: Fake, **settings: Any) -> None:
        super().__init__(*fakes, num_engines=settings.pop("num_engines", len(fakes)), **settings)
        self.publish(10)

    def publish(self, version: int) -> None:
        changing: Any = ["changing"]
        frozen: Any = ["frozen"]
        self.group.publish(PublishedWeights(changing, version, 0, frozen=frozen))

    def exchange(
        self, requests: Sequence[Request] = (), cancelled: Sequence[int] = ()
    ) -> list[Completion]:
        return self.group.exchange(requests, SLICE, cancelled)


def started(*fakes: Fake, **settings: Any) -> Rolling:
    """Return a group whose engines have loaded their first weights."""
    setup = Rolling(*fakes, **settings)
    for each in fakes[: len(setup.pool.engines)]:
        setup.exchange()
        each.loaded()
    setup.exchange()
    return setup


def test_engines_load_one_after_the_other_while_the_others_generate() -> None:
    one, other = Fake(), Fake()
    setup = started(one, other)
    setup.exchange(turns([0, 1]))
    setup.group.rolling.pop_seconds()
    before = other.num_exchanges
    setup.publish(11)
    for _ in range(3):
        setup.exchange()
    assert (one.versions, other.versions) == ([10, 11], [10])
    assert other.num_exchanges == before + 3  # with the turn that it has
    one.loaded()
    before = one.num_exchanges
    for _ in range(3):
        setup.exchange()
    assert (one.versions, other.versions) == ([10, 11], [10, 11])
    assert one.num_exchanges == before + 3
    other.loaded()
    one.finishes = other.finishes = True
    assert sorted(each.key for each in setup.exchange()) == [0, 1]
    assert setup.group.rolling.pop_seconds() == 1.0
    assert setup.group.rolling.pop_seconds() == 0.0
    assert setup.events == []


def test_a_turn_waits_for_weights_as_new_as_when_it_was_submitted(waits: list[float]) -> None:
    one, other = Fake(), Fake()
    setup = started(one, other)
    setup.publish(11)
    waits.clear()
    setup.exchange(turns([0, 1]))
    assert (one.begun, other.begun) == ([], [])
    setup.exchange()
    assert waits == [0.001, 0.001]  # it does not spin while one engine loads and none has a turn
    one.loaded()
    setup.exchange()  # the other one loads: both turns begin at the first
    assert (one.begun, other.begun) == ([0, 1], [])


def test_the_engine_with_the_oldest_weights_loads_those_published_last() -> None:
    one, other = Fake(), Fake()
    setup = started(one, other)
    setup.publish(11)
    setup.exchange(turns([0]))
    setup.publish(12)
    setup.exchange(turns([1]))
    one.loaded()
    assert setup.exchange() == []
    assert (one.versions, other.versions) == ([10, 11], [10, 12])
    assert one.begun == [0]  # the second turn came after version 12
    other.loaded()
    setup.exchange()
    assert (one.versions, other.begun) == ([10, 11, 12], [1])


@pytest.mark.parametrize("outcome", ["dies", "hangs"])
def test_a_failed_load_loses_the_engine_and_moves_its_turns(outcome: str) -> None:
    one, other, again = Fake(), Fake(), Fake()
    setup = started(one, other, again, num_engines=2, call_timeout_s=0.05)
    setup.exchange(turns([0]))
    assert one.begun == [0]
    setup.publish(11)
    setup.exchange()
    if outcome == "dies":
        one.loaded(RayActorError())
    else:
        time.sleep(0.06)
    setup.exchange()  # the other engine loads
    (lost,) = (fields for kind, fields in setup.events if kind == "engine_lost")
    assert (lost["engine"], lost["requests"]) == (0, 1)
    if outcome == "hangs":
        assert lost["reason"] == "it did not load its weights within 0.05 s"
    other.loaded()
    setup.exchange()  # starts the lost one
    setup.exchange()
    assert (again.versions, again.begun) == ([11], [])  # before it generates
    assert again.buckets == [["frozen", "changing"]]
    assert other.buckets == [["frozen", "changing"], ["changing"]]
    assert other.begun == [0]
    again.loaded()
    setup.exchange(turns([2]))
    assert again.begun == [2]
    assert [each.version for each in setup.pool.engines] == [setup.group.version] * 2


def test_an_error_of_the_weights_ends_the_run() -> None:
    one = Fake()
    setup = Rolling(one)
    setup.exchange(turns([0]))
    one.loaded(RayTaskError("load_stored", "traceback", RlctlError("a bucket is corrupted")))
    with pytest.raises(RlctlError, match="a bucket is corrupted"):
        setup.exchange()


def test_a_first_load_may_take_longer_than_a_restart() -> None:
    one = Fake(finishes=True)
    setup = Rolling(one)
    setup.pool.restart_timeout_s = 0.0
    setup.exchange(turns([0]))
    setup.exchange()
    one.loaded()
    assert [each.key for each in setup.exchange()] == [0]


def test_the_run_ends_when_no_engine_can_load_the_weights() -> None:
    setup = Rolling(Fake(), call_timeout_s=0.0)
    setup.pool.restart_timeout_s = 0.0
    setup.exchange(turns([0]))
    with pytest.raises(RlctlError, match="no rollout engine is left"):
        setup.exchange()


def test_a_request_that_is_cancelled_during_a_load_is_dropped_after_it() -> None:
    one = Fake()
    setup = started(one)
    setup.exchange(turns([0, 1]))
    setup.publish(11)
    setup.exchange()
    setup.exchange([], [0])
    setup.exchange()
    assert one.cancelled == []
    one.loaded()
    setup.exchange()
    assert (one.cancelled, [each.key for each in one.open]) == ([0], [1])
    one.finishes = True
    assert [each.key for each in setup.exchange()] == [1]


def test_an_engine_that_is_drained_during_a_load_finishes_its_turns_after_it() -> None:
    one, other = Fake(finishes=False), Fake()
    setup = started(one, other)
    setup.exchange(turns([0, 1]))
    setup.publish(11)
    setup.exchange()
    setup.pool.engines[0].draining = True
    setup.exchange()
    assert len(setup.pool.engines) == 2
    one.loaded()
    one.finishes = True
    assert [each.key for each in setup.exchange()] == [0]
    assert [each.number for each in setup.pool.engines] == [1]
    assert other.versions == [10, 11]
    assert setup.events == []


def test_finish_update_returns_once_all_engines_are_current() -> None:
    one, other = Fake(loads_at_once=True), Fake()
    setup = started(one, other)
    setup.publish(11)
    lock, generated = threading.Lock(), threading.Event()

    def generate() -> None:
        """Exchange in another thread, and end the load once a turn has run beside it."""
        with lock:
            setup.exchange(turns([0]))
        while other.versions != [10, 11]:
            with lock:
                setup.exchange()
        with lock:
            setup.exchange()
        generated.set()
        other.loaded()

    thread = threading.Thread(target=generate)
    thread.start()
    setup.group.finish_update(lock)
    thread.join()
    assert generated.is_set(), "exchanges go on between the loads"
    assert [each.version for each in setup.pool.engines] == [setup.group.version] * 2
    setup.group.finish_update(lock)  # at once
    assert (one.versions, other.versions) == ([10, 11], [10, 11])
