"""Groups of responses in a stream, how it ends, and requests that fail while engines work on them.

Requests have places on engines of several ranks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import MagicMock, create_autospec

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Prompts, Ragged, Rollouts
from rlctl.runtime.generation.overlap import OverlappedGenerator
from rlctl.runtime.generation.policy_engines import ColocatedEngines, RankEngines, TurnEngines
from rlctl.runtime.generation.schedule import Schedule
from rlctl.runtime.generation.separate_engines import SeparateEngines
from rlctl.runtime.generation.stream import Player, SingleTurns, Stream
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, Slice
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from tests.progress import wait_until
from tests.settings import given

N = 3
WAIT_S = 60.0  # far more than anything here takes


Open = list[tuple[Request, int]]  # requests and the indices of their responses


def newest(num_needed: int) -> Callable[[Open], Open]:
    """Finish the newest response in each exchange once `num_needed` are open, and then the rest."""
    left = num_needed

    def finish(responses: Open) -> Open:
        nonlocal left
        if len(responses) < left:
            return []
        left -= 1
        return responses[-1:]

    return finish


class Engines(TurnEngines):
    """Engine whose exchange finishes the responses that `finish` chooses among the open ones.

    A response is its prompt's last token and its index, by the weights of versions 4 and 5.
    """

    def __init__(self, finish: Callable[[Open], Open] = lambda _: []) -> None:
        self.finish = finish
        self.open: Open = []
        self.asked: list[list[int]] = []  # keys of the requests of each exchange
        self.cancelled: list[int] = []
        self.has_work = threading.Event()
        self.error: Exception | None = None

    def exchange(
        self, requests: Sequence[Request], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[Completion]:
        if self.error is not None:
            raise self.error
        self.cancelled += cancelled
        self.asked.append([each.key for each in requests])
        self.open += [(each, index) for each in requests for index in range(len(each.seeds))]
        self.open = [each for each in self.open if each[0].key not in self.cancelled]
        self.has_work.set()
        done = self.finish(self.open)
        self.open = [each for each in self.open if each not in done]
        return [response(*each) for each in done]

    def end_exchange(self) -> None:
        pass


def response(request: Request, index: int) -> Completion:
    ids = torch.tensor([int(request.context_ids[-1]), index])
    return Completion(request.key, index, ids, -ids.float(), "stop", ((4, 1), (5, 1)))


class Tools(Player):
    """Player that waits for something else than the engines, and reports no error of theirs."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    async def play(
        self, prompts: Prompts, seed: int, validate: bool, greedy: bool, schedule: Schedule
    ) -> Rollouts:
        self.begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            raise RuntimeError("the tool was interrupted")

    def check_failures(self, rollouts: Rollouts) -> None:
        pass


class Both(Player):
    """Single turns for all prompts but those of a step with seed 99, which use tools."""

    def __init__(self, turns: SingleTurns, tools: Tools) -> None:
        self.turns, self.tools = turns, tools

    async def play(
        self, prompts: Prompts, seed: int, validate: bool, greedy: bool, schedule: Schedule
    ) -> Rollouts:
        player = self.tools if seed == 99 else self.turns
        return await player.play(prompts, seed, validate, greedy, schedule)

    def check_failures(self, rollouts: Rollouts) -> None:
        pass


def single_turns() -> SingleTurns:
    config = compose("grpo", [f"actor_rollout_ref.rollout.n={N}"]).config
    return SingleTurns(SamplingConfig(config.actor_rollout_ref.rollout, 8, (2,)), 16)


@contextmanager
def streamed(engines: TurnEngines, player: Player | None = None) -> Iterator[Stream]:
    stream = Stream(engines, player or single_turns(), num_threads=1)
    try:
        yield stream
    finally:
        stream.close()
        stream._thread.join(WAIT_S)  # a slow machine needs longer than `close` waits
        assert not stream._thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, os.getpid(), "the stream")


def prompts(*tokens: int, first_group: int = 0) -> Prompts:
    """Return prompts of two tokens, of which `tokens` are the last."""
    ids = Ragged.from_rows([[7, each] for each in tokens], torch.int64)
    rows: list[Any] = [None] * len(tokens)
    return Prompts(ids, torch.arange(first_group, first_group + len(tokens)), rows)


def test_groups_share_the_engines_and_finish_in_any_order() -> None:
    engines = Engines(newest(4 * N))
    with streamed(engines) as stream:
        groups = [prompts(10), prompts(11, 12, first_group=5), prompts(13)]
        futures = [stream.submit(each, seed=1) for each in groups]
        found = [each.result(WAIT_S) for each in futures]
        assert stream.busy_s > 0
    for group, rollouts in zip(groups, found, strict=True):
        tokens = [int(ids[-1]) for ids in group.prompt_ids.rows()]
        expected = [[token, index] for token in tokens for index in range(N)]
        assert [each.tolist() for each in rollouts.response_ids.rows()] == expected
        assert rollouts.group.tolist() == group.group.repeat_interleave(N).tolist()
        assert torch.equal(rollouts.rollout_log_probs.values, -rollouts.response_ids.values.float())
        assert rollouts.versions.values.tolist() == [4, 5] * len(rollouts)


def test_random_streams_depend_on_the_seed_and_the_place_of_a_group() -> None:
    engines = Engines()
    with streamed(engines) as stream:
        for number in range(3):
            stream.submit(prompts(10, 11), seed=number // 2)
        stream.submit(prompts(11, first_group=1), seed=0)
        until(lambda: len(engines.open) == 7 * N)
    seeds = [each.seeds for each, index in engines.open if index == 0]
    assert seeds[:2] == seeds[2:4] == [seeds[0], seeds[6]]
    assert len({*seeds[0], *seeds[1], *seeds[4], *seeds[5]}) == 4 * N
    assert {each.affinity for each, _ in engines.open} == {-1}


def test_an_error_of_the_engines_reaches_every_caller_and_later_ones() -> None:
    engines, tools = Engines(), Tools()
    with streamed(engines, Both(single_turns(), tools)) as stream:
        futures = [stream.submit(prompts(10 + i), seed=1) for i in range(2)]
        futures.append(stream.submit(prompts(12), seed=99))
        assert tools.begun.wait(WAIT_S)
        assert engines.has_work.wait(WAIT_S)
        engines.error = RlctlError("no rollout engine is left")
        for each in futures:
            with pytest.raises(RlctlError, match="no rollout engine is left"):
                each.result(WAIT_S)
        with pytest.raises(RlctlError, match="no rollout engine is left"):
            stream.submit(prompts(13), seed=1).result(WAIT_S)


def test_an_error_of_one_group_leaves_the_others() -> None:
    engines = Engines(newest(N))
    with streamed(engines) as stream:
        too_long = replace(prompts(10), prompt_ids=Ragged.from_rows([[7] * 16], torch.int64))
        with pytest.raises(RlctlError, match="leave space for a response"):
            stream.submit(too_long, seed=1).result(WAIT_S)
        assert len(stream.submit(prompts(12), seed=1).result(WAIT_S)) == N


def test_a_cancelled_group_leaves_the_engines() -> None:
    engines = Engines()
    with streamed(engines) as stream:
        dropped = stream.submit(prompts(10, 11), seed=1)
        until(lambda: len(engines.open) == 2 * N)
        dropped.cancel()
        until(lambda: not engines.open)
    assert len(engines.cancelled) == 2


def test_close_ends_the_thread_while_requests_are_open() -> None:
    engines = Engines()
    with streamed(engines) as stream:
        future = stream.submit(prompts(10), seed=1)
        assert engines.has_work.wait(WAIT_S)
        stream.close()
        with pytest.raises(CancelledError):
            future.result(WAIT_S)


class Slow(Engines):
    """Engine whose exchange lasts until the test ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end, self.has_ended = threading.Event(), threading.Event()

    def exchange(
        self, requests: Sequence[Request], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[Completion]:
        self.has_work.set()
        self.may_end.wait(WAIT_S)
        self.has_ended.set()
        return []


def test_close_waits_for_the_exchange_that_is_under_way() -> None:
    engines = Slow()
    with streamed(engines) as stream:
        stream.submit(prompts(10), seed=1)
        assert engines.has_work.wait(WAIT_S)
        closing = threading.Thread(target=stream.close)
        closing.start()
        assert stream._thread.is_alive()
        engines.may_end.set()
        closing.join(WAIT_S)
    assert engines.has_ended.is_set()


def test_close_gives_up_an_exchange_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Slow()
    with streamed(engines) as stream:
        stream.submit(prompts(10), seed=1)
        assert engines.has_work.wait(WAIT_S)
        with monkeypatch.context() as patch:
            patch.setattr("rlctl.runtime.generation.stream._CLOSE_S", 0.01)
            stream.close()
        assert not engines.has_ended.is_set()
        engines.may_end.set()


def one_slot(responses: Open) -> Open:
    """Work on the oldest request, and on that with key 0 without end."""
    return [each for each in responses[:1] if each[0].key]


def turn(key: int, episode: int) -> Request:
    decoding = Decoding(1.0, 1.0, -1, (2,))
    return Request(key, torch.tensor([3]), decoding, (9,), (0,), affinity=episode)


async def episode(schedule: Schedule, number: int, limit_s: float | None) -> str:
    request = turn(number, number)
    try:
        async with asyncio.timeout(limit_s):
            return (await schedule.generate(request)).finish
    except TimeoutError:
        return "timeout"


@pytest.mark.parametrize("fixed", [True, False])
def test_a_turn_past_the_deadline_frees_its_slot(fixed: bool) -> None:
    engines = Engines(one_slot)
    schedule = Schedule(engines, fixed=fixed, num_threads=1)
    limits = [0.1, None, None]
    runs = schedule.gather(episode(schedule, *each) for each in enumerate(limits))
    assert asyncio.run(schedule.run(runs)) == ["timeout", "stop", "stop"]
    assert (engines.cancelled, engines.open) == ([0], [])


def test_a_turn_that_was_not_sent_never_reaches_an_engine() -> None:
    engines = Engines(one_slot)
    schedule = Schedule(engines, fixed=True, num_threads=1)
    ended = asyncio.Event()

    async def first() -> str:
        outcome = await episode(schedule, 0, 0.05)
        ended.set()
        return outcome

    async def second() -> str:
        await ended.wait()  # until then it sends nothing, and the schedule waits for it
        return await episode(schedule, 1, None)

    assert asyncio.run(schedule.run(schedule.gather([first(), second()]))) == ["timeout", "stop"]
    assert (engines.cancelled, engines.open) == ([], [])


@pytest.mark.parametrize("delay_s", [0, 0.02])
def test_requests_of_one_episode_share_no_step(delay_s: float) -> None:
    """Batches are the same, however late the second of two concurrent requests arrives."""
    engines = Engines(lambda responses: responses)
    schedule = Schedule(engines, fixed=True, num_threads=1)

    async def ask(number: int, key: int, delay_s: float = 0) -> None:
        await asyncio.sleep(delay_s)
        await schedule.generate(turn(key, number))

    async def two_at_a_time(number: int) -> None:
        await asyncio.gather(ask(number, 10 * number), ask(number, 10 * number + 1, delay_s))

    asyncio.run(schedule.run(schedule.gather(map(two_at_a_time, range(3)))))
    assert engines.asked == [[0, 10, 20], [1, 11, 21]]


def test_overlap_places_requests_on_engines() -> None:
    """Two engines of two ranks each, and a pool of three."""
    decoding = Decoding(1.0, 1.0, -1, ())
    ids = [Request(i, torch.tensor([1]), decoding, (4,), (i,)) for i in range(12)]
    pool = create_autospec(SeparateEngines, instance=True)
    pool.num_engines.return_value = 3
    colocated = ColocatedEngines(create_autospec(RankEngines), 4, 2)
    for divided, expected in (
        (colocated.divide(ids), {0: 6, 1: 6}),
        (SeparateEngines.divide(pool, ids), {0: 4, 1: 4, 2: 4}),
    ):
        assert Counter(request.affinity for request in divided) == expected


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
    config = compose("grpo", given(tensor=2, n=2)).config
    sampling = SamplingConfig(config.actor_rollout_ref.rollout, 8, (2,))
    ranks, reward = Ranks(), MagicMock()
    engines = ColocatedEngines(cast(Any, ranks), 4, 2)
    overlapped = OverlappedGenerator(engines, sampling, 1024, reward)
    lengths = [3, 1, 4, 2, 5]
    ids = Ragged.from_rows([[7] * n for n in lengths], torch.int64)
    rollouts = overlapped.generate_sequences(
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
