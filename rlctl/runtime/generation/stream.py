"""Continuous generation: groups of responses start and finish at any time, in one thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from typing import Protocol

import torch

from rlctl.errors import ConfigError
from rlctl.runtime.base.batch import Prompts, Rollouts
from rlctl.runtime.base.clock import timed
from rlctl.runtime.generation.on_engines import OnEngines
from rlctl.runtime.generation.policy_engines import Engines, TurnEngines
from rlctl.runtime.generation.schedule import OnStates, Schedule
from rlctl.runtime.rollout.engine import in_order, to_requests, to_responses
from rlctl.runtime.rollout.sampling_params import SamplingConfig, to_rollouts

_CLOSE_S = 5.0  # for the exchange under way: a stopped run must not wait for a hung engine


class Player(Protocol):
    """Generator of the responses to some prompts, while others share the engines."""

    async def play(
        self, prompts: Prompts, seed: int, validate: bool, greedy: bool, schedule: Schedule
    ) -> Rollouts:
        """Return n responses to each of B prompts: see `Generator.generate_sequences`."""
        ...

    def check_failures(self, rollouts: Rollouts) -> None:
        """Raise RlctlError if too many episodes of a batch failed."""
        ...


class SingleTurns(Player):
    """Player of plain responses; `context_length` limits prompt and response together."""

    def __init__(self, sampling: SamplingConfig, context_length: int) -> None:
        self.sampling = sampling
        self.context_length = context_length

    async def play(
        self, prompts: Prompts, seed: int, validate: bool, greedy: bool, schedule: Schedule
    ) -> Rollouts:
        params = self.sampling.params(prompts.group, seed, validate, greedy, prompts.images)
        requests = [
            replace(request, affinity=-1)
            for request in to_requests(prompts.prompt_ids, params, self.context_length)
        ]
        parts = await asyncio.gather(*map(schedule.complete, requests))
        rows = in_order(requests, chain(*parts))
        rollouts = to_rollouts(prompts, params.n, to_responses(rows))
        versions = torch.tensor([i for row in rows for i in row.versions], dtype=torch.int64)
        return replace(rollouts, versions=rollouts.response_ids.like(versions))

    def check_failures(self, rollouts: Rollouts) -> None:
        """Do nothing: a plain response does not fail."""


class Stream:
    """Thread that plays groups of responses, which share the engines, until it is closed.

    Args:
        engines: the engines; an exchange may load new weights in mid-response.
        player: generates the responses of a call.
        num_threads: OpenMP threads of the engines that run in this process.
        on_states: called with the states of episodes before each exchange and each pause.
    """

    def __init__(
        self,
        engines: TurnEngines,
        player: Player,
        num_threads: int,
        on_states: OnStates = lambda _: None,
    ) -> None:
        if not hasattr(player, "play"):  # a plug-in's
            raise ConfigError(
                f"the generator {type(player).__name__} has no `play`, with which it generates "
                "while the policy learns",
                where="async_training.schedule=eager",
                hint="async_training.schedule=fixed",
            )
        self.player = player
        self._schedule = Schedule(
            engines, fixed=False, num_threads=num_threads, on_states=on_states
        )
        self._loop = asyncio.new_event_loop()
        self._error: BaseException | None = None  # of the engines
        self._plays: set[asyncio.Task[object]] = set()
        self._closing = asyncio.Event()
        # A daemon: after an error of the trainer nothing waits for it.
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """Seconds in which the engines had work so far."""
        return self._schedule.busy_s

    def submit(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Future[Rollouts]:
        """Begin responses to B prompts: see `Generator.generate_sequences`.

        The future raises what ends the stream, such as RlctlError for lost engines.
        """
        played = self._play(prompts, seed, validate, greedy)
        return asyncio.run_coroutine_threadsafe(played, self._loop)

    def close(self) -> None:
        """Drop what is open and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_S)

    async def _play(self, prompts: Prompts, seed: int, validate: bool, greedy: bool) -> Rollouts:
        if self._error is not None:
            raise self._error
        task = asyncio.current_task()
        assert task is not None, "it runs as a task of the loop"
        self._plays.add(task)
        try:
            return await self.player.play(prompts, seed, validate, greedy, self._schedule)
        except BaseException:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            self._plays.discard(task)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        """Serve until `close`; after an error of the engines, open and further calls raise it."""
        serving = asyncio.create_task(self._schedule.serve())
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait({serving, closing}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            self._error = serving.exception()
            # Wherever they are: a program would retry its request, or count it as its failure.
            for play in self._plays:
                play.cancel()
            await closing
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class StreamedGenerator(OnEngines):
    """Generator whose responses join the `stream`."""

    def __init__(self, engines: Engines, stream: Stream) -> None:
        super().__init__(engines)
        self.stream = stream

    @timed("gen")
    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        rollouts = self.stream.submit(prompts, seed, validate, greedy).result()
        self.stream.player.check_failures(rollouts)
        return rollouts
