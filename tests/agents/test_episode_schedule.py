"""Requests of episodes that fail while engines work on them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial

import pytest
import torch

from rlctl.runtime.agents.schedule import Schedule, TurnEngines
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, Slice


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
