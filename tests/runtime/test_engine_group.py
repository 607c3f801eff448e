"""Requests of lost engines: reassigned, given up, and engines restarted, without Ray.

Real processes are in tests/distributed/test_engines.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from rlctl.errors import InternalError, RlctlError
from rlctl.runtime.base.batch import Prompts, Ragged, Rollouts
from rlctl.runtime.base.roles import LostEnginesError
from rlctl.runtime.cluster import engine_group, engine_processes, live_engines, pool_engine
from rlctl.runtime.cluster.channels import StoredWeights
from rlctl.runtime.cluster.engine_group import EngineGroup
from rlctl.runtime.cluster.engine_processes import EngineProcesses
from rlctl.runtime.cluster.open_turns import OpenTurn
from rlctl.runtime.cluster.pool import PoolSpec
from rlctl.runtime.cluster.pool_engine import Engine
from rlctl.runtime.generation.separate_engines import SeparateEngines
from rlctl.runtime.rollout.engine_weights import Selection
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, Slice
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.rollout.weight_sync import WeightChannel
from rlctl.runtime.workers.rollout import RolloutSpec
from tests.configs import configured
from tests.distributed.ranks import rank_info

NUM_PROMPTS = 16
ROLLOUT = "actor_rollout_ref.rollout"
TRANSPORT = f"{ROLLOUT}.checkpoint_engine.backend=object_store"


@dataclass(eq=False)
class Ref:
    """A finished call, or one that never finishes."""

    value: Any = None
    hangs: bool = False


def wait(refs: list[Ref], **options: Any) -> Any:
    del options
    return [ref for ref in refs if not ref.hangs], [ref for ref in refs if ref.hangs]


def get(ref: Ref, timeout: float | None = None) -> Any:
    if ref.hangs:
        raise GetTimeoutError(f"after {timeout} s")
    if isinstance(ref.value, Exception):
        raise ref.value
    return ref.value


Script = Callable[[str, tuple[Any, ...]], Any]


class Handle:
    """A process whose calls return what `script(method, args)` returns, or raise it later."""

    def __init__(self, script: Script, number: int, synced: list[list[int]]) -> None:
        self.script, self.number, self.synced = script, number, synced
        self.call = SimpleNamespace(remote=self._call, options=lambda **_: self.call)
        self.load_stored = SimpleNamespace(remote=self._load)

    def _load(self, *args: Any) -> Ref:
        if self.synced:
            self.synced[-1].append(self.number)
        return self._result("load_stored", args)

    def _call(self, role: str, method: str, args: tuple[Any, ...], kwargs: Any) -> Ref:
        return self._result(method, args)

    def _result(self, method: str, args: tuple[Any, ...]) -> Ref:
        result = self.script(method, args)
        return result if isinstance(result, Ref) else Ref(result)


class Processes(EngineProcesses):
    """Engine slots without Ray; `scripts` gives each process's behaviour, by order of start."""

    def __init__(self, scripts: list[Script], num_engines: int = 2, call_timeout_s: float = 60.0):
        self.spec = PoolSpec("engines", num_engines, rank_info(), 60.0, call_timeout_s, False, 1.0)
        self.restart_timeout_s = 0.3
        self.engines = [Engine(number, ()) for number in range(num_engines)]
        self.num_configured, self.joined = num_engines, deque()
        self.scripts = scripts
        self.num_starts = 0
        self.synced: list[list[int]] = []  # engine numbers of each weight sync

    def start(self, engine: Engine, spec: RolloutSpec) -> None:
        script = self.scripts[min(self.num_starts, len(self.scripts) - 1)]
        self.num_starts += 1
        engine.handle = Handle(script, engine.number, self.synced)
        engine.start_result = engine.handle.call.remote("rollout", "build", (), {})
        engine.started_at, engine.version = time.monotonic(), -1


def exchanging(reply: Callable[[list[Request]], Any], calls: list[Any] | None = None) -> Script:
    """Return an engine whose exchanges give `reply(requests)`; keys and cancelled go to `calls`."""

    def script(method: str, args: tuple[Any, ...]) -> Any:
        if method != "exchange":
            return None
        if calls is not None:
            calls.append(([each.key for each in args[0]], list(args[2])))
        return reply(args[0])

    return script


def lost(_: list[Request]) -> RayActorError:
    return RayActorError()


def healthy(method: str, args: tuple[Any, ...]) -> Any:
    return completed(args[0]) if method == "exchange" else None


def dying(method: str, args: tuple[Any, ...]) -> Any:
    return RayActorError() if method == "exchange" else None


def hanging(method: str, args: tuple[Any, ...]) -> Any:
    return Ref(hangs=method == "exchange")


def broken_start(method: str, args: tuple[Any, ...]) -> Any:
    return RayActorError() if method == "build" else None


class Setup:
    """A group of fake engines and what it does."""

    def __init__(self, *scripts: Script, **settings: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.selections: list[Selection] = []  # what it sends
        config = configured("grpo", [f"{ROLLOUT}.n=1", TRANSPORT], ()).actor_rollout_ref
        spec = RolloutSpec(config.model, SamplingConfig(config.rollout, 8, (2,)), 8, seed=1)
        self.pool = Processes(list(scripts), **settings)
        self.synced = self.pool.synced
        self.group = EngineGroup(
            self.pool, spec, lambda kind, **fields: self.events.append((kind, fields))
        )
        self.group.wait()
        self.engines = SeparateEngines(cast(Any, SimpleNamespace()), self.group)

    def send_weights(self, channel: WeightChannel[StoredWeights]) -> list[StoredWeights]:
        self.synced.append([])
        self.selections.append(channel.selection)
        return [channel.close(version=1)]

    def generate(self) -> Rollouts:
        self.group.update_weights(self.send_weights)
        return self.engines.generate_sequences(prompts(), seed=1)

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def synced(*scripts: Script) -> Setup:
    """Return a group whose engines have the weights."""
    setup = Setup(*scripts)
    setup.group.update_weights(setup.send_weights)
    return setup


def turns(numbers: Iterable[int]) -> list[Request]:
    """Return the second turns of episodes `numbers`, whose caches their engines keep."""
    decoding = Decoding(1.0, 1.0, -1, (2,))
    ids = torch.tensor([3, 4])
    return [Request(n, ids, decoding, (4,), (n,), previous=100 + n, affinity=n) for n in numbers]


def completed(requests: list[Request]) -> list[Completion]:
    return [Completion(each.key, 0, each.context_ids, torch.zeros(1), "stop") for each in requests]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(wait=wait, get=get, kill=lambda _: None)
    for module in (engine_group, live_engines, pool_engine, engine_processes):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(engine_group, "_PAUSE_S", 0.001)
    monkeypatch.setattr(live_engines, "gather", lambda *_: None)


def prompts() -> Prompts:
    ids = Ragged.from_rows([[5 + row] for row in range(NUM_PROMPTS)], torch.int64)
    return Prompts(ids, torch.arange(NUM_PROMPTS), [])


def assert_complete(rollouts: Rollouts) -> None:
    assert rollouts.group.tolist() == list(range(NUM_PROMPTS))
    assert rollouts.response_ids.values.tolist() == [5 + row for row in range(NUM_PROMPTS)]


def test_healthy_engines_share_the_requests_after_one_weight_sync() -> None:
    setup = Setup(healthy)
    for _ in range(2):
        assert_complete(setup.generate())
    assert setup.synced == [[0, 1]]
    setup.group.mark_stale()
    assert_complete(setup.generate())
    assert setup.synced == [[0, 1], [0, 1]]
    assert setup.selections == [Selection.ALL, Selection.CHANGING]
    assert setup.events == []


def test_generation_with_stale_weights_names_the_missing_call() -> None:
    setup = Setup(healthy)
    with pytest.raises(InternalError, match="call update_weights before"):
        setup.engines.generate_sequences(prompts(), seed=1)
    setup.generate()
    setup.group.mark_stale()
    with pytest.raises(InternalError, match="call update_weights before"):
        setup.engines.generate_sequences(prompts(), seed=1)


def test_requests_of_a_lost_engine_are_reassigned_and_it_restarts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup(dying, healthy)
    assert_complete(setup.generate())
    assert setup.kinds() == ["engine_lost"]
    assert setup.events[0][1]["requests"] == NUM_PROMPTS // 2
    assert "rollout engine 0 is lost (" in caplog.text
    assert_complete(setup.generate())
    assert setup.kinds() == ["engine_lost", "engine_restarted"]
    assert setup.synced == [[0, 1], [0]]  # the restarted engine needs the weights
    assert setup.selections == [Selection.ALL] * 2
    assert [engine.num_failures for engine in setup.pool.engines] == [0, 0]


def test_engines_that_restart_while_the_trainer_learns_wait_for_the_next_broadcast() -> None:
    setup = Setup(dying, healthy, num_engines=1)
    setup.group.broadcast(setup.send_weights)
    setup.group.end_broadcasts()
    with pytest.raises(LostEnginesError, match="no rollout engine with the weights of this step"):
        setup.engines.generate_sequences(prompts(), seed=1)
    assert not setup.group.unplaced
    while not setup.pool.engines[0].ready:
        setup.group.restart_lost()
    setup.group.update_weights(setup.send_weights)
    assert setup.synced == [[0]], "the trainer has changed its weights"
    setup.group.broadcast(setup.send_weights)
    setup.group.end_broadcasts()
    assert_complete(setup.engines.generate_sequences(prompts(), seed=1))
    assert setup.synced == [[0], [0]]
    assert setup.kinds() == ["engine_lost", "engine_restarted"]


def test_turns_of_a_lost_engine_move_to_another() -> None:
    seen: list[list[tuple[int, int | None]]] = []

    def complete(requests: list[Request]) -> list[Completion]:
        seen.append([(each.key, each.previous) for each in requests])
        return completed(requests)

    setup = synced(exchanging(lost), exchanging(complete))
    found = setup.group.exchange(turns(range(4)), Slice(8))
    assert sorted(each.key for each in found) == [1, 3]
    assert setup.kinds() == ["engine_lost"]
    assert setup.events[0][1]["requests"] == 2
    while len(found) < 4:
        found += setup.group.exchange([], Slice(8))
    assert sorted(each.key for each in found) == [0, 1, 2, 3]
    assert seen[0] == [(1, 101), (3, 103)]
    assert sorted(each for part in seen[1:] for each in part) == [(0, None), (2, None)]


def test_missing_responses_of_a_lost_engine_are_generated_by_another() -> None:
    """A request has three responses, of which the first engine gives one before it is lost."""
    (request,) = turns([0])
    request = replace(request, previous=None, max_tokens=(4, 5, 6), seeds=(7, 8, 9))
    asked: list[Request] = []

    def reply(indices: tuple[int, ...], requests: list[Request]) -> list[Completion]:
        asked.extend(requests)
        return [replace(completed(requests)[0], index=i) for i in indices if requests]

    one = exchanging(lambda requests: reply((1,), requests) or RayActorError())
    setup = synced(one, exchanging(partial(reply, (1, 0))))
    found = setup.group.exchange([request], Slice(8))
    assert [each.index for each in found] == [1]
    while len(found) < 3:
        found += setup.group.exchange([], Slice(8))
    assert [each.index for each in found] == [1, 2, 0]
    assert [(each.max_tokens, each.seeds) for each in asked] == [
        ((4, 5, 6), (7, 8, 9)),
        ((4, 6), (7, 9)),
    ]
    assert not any(engine.turns for engine in setup.pool.engines)


def test_cancelled_turns_reach_their_engines_and_are_not_moved() -> None:
    calls: list[tuple[list[int], list[int]]] = []

    setup = synced(exchanging(lambda _: RayActorError() if len(calls) == 5 else [], calls))
    setup.group.exchange(turns(range(4)), Slice(8), [])
    setup.group.exchange([], Slice(8), [1, 2])
    assert calls == [([0, 2], []), ([1, 3], []), ([], [2]), ([], [1])]
    setup.group.exchange([], Slice(8), [])  # loses the first engine, which still had turn 0
    setup.group.exchange([], Slice(8), [])
    assert [keys for keys, _ in calls[6:] if keys] == [[0]]


def test_turns_that_are_lost_with_three_engines_end_the_run() -> None:
    setup = synced(exchanging(lost))
    setup.pool.restart_timeout_s = 30.0
    setup.group.exchange(turns(range(4)), Slice(8))
    forever = iter(lambda: setup.group.exchange([], Slice(8)), None)
    with pytest.raises(RlctlError, match="3 rollout engines were lost with the same prompts"):
        list(forever)


def test_a_hung_engine_is_lost_after_the_call_timeout() -> None:
    setup = Setup(hanging, healthy, call_timeout_s=0.05)
    assert_complete(setup.generate())
    assert setup.kinds()[0] == "engine_lost"
    assert setup.events[0][1]["reason"] == "it returned no result within 0.05 s"


def test_repeated_failures_of_an_engine_delay_its_restart() -> None:
    pool = Processes([healthy], num_engines=1)
    [engine] = pool.engines
    for delay in (0, 1, 2, 4, 8, 16, 30, 30):
        engine.handle, before = object(), time.monotonic()
        pool.stop(engine)
        assert before + delay <= engine.retry_at <= time.monotonic() + delay


def join(setup: Setup) -> Engine:
    """Start one more engine, as `Membership` does once devices are reserved."""
    engine = Engine(7, None, joining=True)
    setup.pool.start(engine, setup.group.spec)
    setup.pool.joined.append(engine)
    return engine


def test_an_added_engine_gets_the_weights_and_then_requests() -> None:
    numbers: list[int] = []

    def counting(number: int, method: str, args: tuple[Any, ...]) -> Any:
        numbers.extend(number for _ in (args[0] if method == "exchange" else ()))
        return healthy(method, args)

    setup = Setup(*(partial(counting, number) for number in (0, 1, 7)))
    assert_complete(setup.generate())
    assert numbers == [0] * (NUM_PROMPTS // 2) + [1] * (NUM_PROMPTS // 2)
    engine = join(setup)
    assert_complete(setup.generate())
    assert setup.synced == [[0, 1], [7]]
    assert set(numbers[NUM_PROMPTS:]) == {0, 1, 7}
    assert setup.events[0][0] == "engine_added"
    assert engine.num_responses > 0
    assert not engine.joining


def test_an_added_engine_that_does_not_start_is_given_up() -> None:
    setup = Setup(healthy, healthy, broken_start)
    engine = join(setup)
    assert_complete(setup.generate())
    assert engine not in setup.pool.engines
    assert setup.kinds() == ["engine_lost"]
    assert engine.failure is not None


def test_a_drained_engine_finishes_its_turns_and_gets_no_new_ones() -> None:
    seen: list[tuple[int, list[int]]] = []

    def slow(number: int, requests: list[Request]) -> list[Completion]:
        seen.append((number, [each.key for each in requests]))
        return completed(turns([number])) if len(seen) > 2 else []

    setup = synced(*(exchanging(partial(slow, number)) for number in range(2)))
    setup.group.exchange(turns([0, 1]), Slice(8))
    setup.pool.engines[0].draining = True
    found = setup.group.exchange(turns([2]), Slice(8))
    assert seen == [(0, [0]), (1, [1]), (0, []), (1, [2])]
    assert sorted(each.key for each in found) == [0, 1]
    assert [engine.number for engine in setup.pool.engines] == [1]
    assert setup.events == []


def test_turns_wait_while_only_a_drained_engine_is_ready() -> None:
    setup = synced(exchanging(lambda requests: completed(requests or turns([0]))))
    first, second = setup.pool.engines
    first.turns = {0: OpenTurn.of(turns([0])[0])}
    first.draining, second.version = True, -1
    second.handle, second.retry_at = None, time.monotonic() + 60
    assert [each.key for each in setup.group.exchange(turns([1]), Slice(8))] == [0]
    second.retry_at = 0.0
    assert setup.group.exchange([], Slice(8)) == []  # starts it
    assert [each.key for each in setup.group.exchange([], Slice(8))] == [1]


def test_an_engine_that_is_lost_in_a_broadcast_waits_for_the_next() -> None:
    """Its turn moves to the other one, which has the weights at once."""
    begun: list[tuple[int, list[int]]] = []

    def script(number: int, loads: int) -> Script:
        def call(method: str, args: tuple[Any, ...]) -> Any:
            nonlocal loads
            if method == "exchange":
                begun.append((number, [each.key for each in args[0]]))
                return []
            loads -= method == "load_stored"
            return RayActorError() if loads < 0 else None

        return call

    setup = Setup(script(0, 1), script(1, 9), script(2, 9))
    setup.group.broadcast(setup.send_weights)
    setup.group.exchange(turns([0, 1]), Slice(8))
    setup.group.broadcast(setup.send_weights)
    setup.group.end_broadcasts()
    for _ in range(3):
        setup.group.exchange([], Slice(8))
    assert setup.kinds() == ["engine_lost", "engine_restarted"]
    assert setup.synced == [[0, 1], [0, 1]]
    assert [keys for keys in begun if keys[1]] == [(0, [0]), (1, [1]), (1, [0])]
    setup.group.broadcast(setup.send_weights)
    assert setup.synced[2:] == [[0, 1]]
    assert setup.selections[2] is Selection.ALL
    setup.group.exchange(turns([2]), Slice(8))
    assert begun[-2:] == [(2, [2]), (1, [])]
