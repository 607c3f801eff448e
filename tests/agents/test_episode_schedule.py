"""Requests that fail while engines work on them, and their places on engines of several ranks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, create_autospec

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.agents.actor import ColocatedEngines, RankEngines
from rlctl.runtime.agents.schedule import Schedule, TurnEngines
from rlctl.runtime.agents.stream import OverlappedActor
from rlctl.runtime.batch import Prompts, Ragged
from rlctl.runtime.cluster.disaggregated import DisaggregatedActor
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.roles import Actor, Roles
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, Slice
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.training.generation import _overlapped


class OneSlot(TurnEngines):
    """Engine with one slot: a request with key 0 never completes, others do at once."""

    def __init__(self) -> None:
        self.open: list[Request] = []
        self.cancelled: list[int] = []

    def exchange(
        self, requests: Sequence[Request], limit: Slice, cancelled: Collection[int]
    ) -> list[Completion]:
        self.cancelled += cancelled
        self.open = [each for each in [*self.open, *requests] if each.key not in cancelled]
        if not self.open or self.open[0].key == 0:
            return []
        first = self.open.pop(0)
        return [Completion(first.key, 0, torch.tensor([2]), torch.zeros(1), "stop")]


async def episode(schedule: Schedule, number: int, limit_s: float | None) -> str:
    decoding = Decoding(1.0, 1.0, -1, (2,))
    request = Request(number, torch.tensor([3]), decoding, (9,), (0,), affinity=number)
    try:
        async with asyncio.timeout(limit_s):
            return (await schedule.generate(request)).finish
    except TimeoutError:
        return "timeout"


@pytest.mark.parametrize("fixed", [True, False])
def test_a_turn_past_the_deadline_frees_its_slot(fixed: bool) -> None:
    engines = OneSlot()
    schedule = Schedule(engines, fixed=fixed, num_threads=1)
    limits = [0.1, None, None]
    runs = [partial(episode, schedule, *each) for each in enumerate(limits)]
    assert asyncio.run(schedule.run(runs)) == ["timeout", "stop", "stop"]
    assert (engines.cancelled, engines.open) == ([0], [])


def test_a_turn_that_was_not_sent_never_reaches_an_engine() -> None:
    engines = OneSlot()
    schedule = Schedule(engines, fixed=True, num_threads=1)
    ended = asyncio.Event()

    async def first() -> str:
        outcome = await episode(schedule, 0, 0.05)
        ended.set()
        return outcome

    async def second() -> str:
        await ended.wait()  # until then it sends nothing, and the schedule waits for it
        return await episode(schedule, 1, None)

    assert asyncio.run(schedule.run([first, second])) == ["timeout", "stop"]
    assert (engines.cancelled, engines.open) == ([], [])


class Recorder(TurnEngines):
    """Engine that completes every request in the exchange that brings it, and records the keys."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def exchange(
        self, requests: Sequence[Request], limit: Slice, cancelled: Collection[int]
    ) -> list[Completion]:
        self.batches.append([request.key for request in requests])
        return [
            Completion(request.key, 0, torch.tensor([2]), torch.zeros(1), "stop")
            for request in requests
        ]


@pytest.mark.parametrize("delay_s", [0, 0.02])
def test_requests_of_one_episode_share_no_step(delay_s: float) -> None:
    """Batches are the same, however late the second of two concurrent requests arrives."""
    engines = Recorder()
    schedule = Schedule(engines, fixed=True, num_threads=1)

    async def ask(number: int, key: int, delay_s: float = 0) -> None:
        await asyncio.sleep(delay_s)
        decoding = Decoding(1.0, 1.0, -1, (2,))
        request = Request(key, torch.tensor([3]), decoding, (9,), (0,), affinity=number)
        await schedule.generate(request)

    async def two_at_a_time(number: int) -> None:
        await asyncio.gather(ask(number, 10 * number), ask(number, 10 * number + 1, delay_s))

    asyncio.run(schedule.run([partial(two_at_a_time, number) for number in range(3)]))
    assert engines.batches == [[0, 10, 20], [1, 11, 21]]


def overlapped(engines: TurnEngines, *overrides: str) -> Actor:
    """Return the actor of a run whose rewards are computed in processes."""
    config = compose("grpo", list(overrides)).config
    rollout = config.actor_rollout_ref.rollout
    actor, reward = create_autospec(Actor), create_autospec(RuleReward)
    sampling = SamplingConfig(rollout, 8, (2,))
    roles = _overlapped(config, Roles(actor, reward), engines, 4, sampling, reward)
    return roles.actor


def test_overlap_places_requests_on_engines(caplog: pytest.LogCaptureFixture) -> None:
    """One engine of two ranks each, a pool of three, and a pool whose engines return groups."""
    decoding = Decoding(1.0, 1.0, -1, ())
    ids = [Request(i, torch.tensor([1]), decoding, (4,), (i,)) for i in range(12)]
    shared = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    pool = create_autospec(DisaggregatedActor, instance=True)
    pool.num_engines.return_value = 3
    for engines, overrides, expected in (
        (ColocatedEngines(create_autospec(RankEngines), 4, 2), [shared], {0: 6, 1: 6}),
        (pool, [], {0: 4, 1: 4, 2: 4}),
    ):
        actor = overlapped(engines, *overrides)
        assert isinstance(actor, OverlappedActor)
        assert Counter(each.affinity for each in actor._placed(ids)) == expected
    caplog.set_level("INFO", "rlctl")
    actor = overlapped(pool, "actor_rollout_ref.rollout.mode=async")
    assert not isinstance(actor, OverlappedActor)
    assert "responses are scored after generation, although reward.overlap is true" in caplog.text


class Ranks:
    """Ranks whose engines finish each request at once, with its length as the response."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[Request]], Slice]] = []

    def exchange(
        self, requests: list[list[Request]], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[list[Completion]]:
        assert not cancelled
        self.calls.append((requests, limit))
        return [
            [
                Completion(each.key, i, ids, torch.zeros(1), "stop")
                for each in part
                for i, ids in enumerate([torch.tensor([len(each.context_ids)])] * len(each.seeds))
            ]
            for part in requests
        ]

    def end_exchange(self) -> None:
        pass


def test_ranks_that_share_an_engine_get_the_same_requests_and_steps() -> None:
    rollout = "actor_rollout_ref.rollout"
    config = compose("grpo", [f"{rollout}.tensor_model_parallel_size=2", f"{rollout}.n=2"]).config
    sampling = SamplingConfig(config.actor_rollout_ref.rollout, 8, (2,))
    ranks, reward = Ranks(), MagicMock()
    roles = Roles(cast(Any, SimpleNamespace()), cast(Any, reward))
    overlapped = _overlapped(config, roles, ColocatedEngines(ranks, 4, 2), 4, sampling, reward)
    lengths = [3, 1, 4, 2, 5]
    ids = Ragged.from_rows([[7] * n for n in lengths], torch.int64)
    rollouts = overlapped.actor.generate_sequences(
        Prompts(ids, torch.arange(5), cast(Any, [None] * 5)), seed=1
    )
    assert rollouts.response_ids.values.tolist() == [n for n in lengths for _ in range(2)]
    ((parts, limit),) = ranks.calls
    assert [[len(each.context_ids) for each in part] for part in parts] == 2 * [[4, 3, 1]] + 2 * [
        [5, 2]
    ]
    assert (limit.steps, limit.seconds) == (8, None)
    assert reward.begin().add.call_count == 10
    reward.begin().finish.assert_called_once_with(rollouts)
