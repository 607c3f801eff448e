"""Engines that generate under the weights of the policy: what all generators of a run share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from rlctl.runtime.base.batch import Prompts, Rollouts
from rlctl.runtime.base.roles import Generator, Published
from rlctl.runtime.rollout.requests import Completion, Request, Slice

FIXED = Slice(steps=8)


class TurnEngines(Protocol):
    """Engines that generate the turns of episodes, under the weights synced last."""

    def exchange(
        self, requests: Sequence[Request], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[Completion]:
        """Submit requests of one response each and advance all engines; return what finished.

        Open requests with `cancelled` keys are dropped before. Raises RlctlError if the engines are
        lost.
        """
        ...

    def divide(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests of a batch with their engines as affinities."""
        ...

    def end_exchange(self) -> None:
        """Release memory after the last exchange of a batch of episodes."""
        ...


class Engines(Generator, TurnEngines, Protocol):
    """Engines of a run: they generate single responses, and turns for other generators."""

    are_separate: bool  # in other processes, so that they generate while the policy learns


class RankEngines(Generator, Protocol):
    """Worker group with an engine for each rank, or for several consecutive ranks."""

    def exchange(
        self, requests: list[list[Request]], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[list[Completion]]:
        """Exchange each rank's requests for what its engine has finished."""
        ...

    def end_exchange(self) -> None:
        """Release the engines' memory."""
        ...


class ColocatedEngines(Engines):
    """Engines in the processes of a worker group; a request's affinity chooses its engine."""

    are_separate = False

    def __init__(self, workers: RankEngines, num_ranks: int = 1, ranks_per_engine: int = 1) -> None:
        self.workers = workers
        self.num_ranks = num_ranks
        self.ranks_per_engine = ranks_per_engine

    def update_weights(self) -> None:
        self.workers.update_weights()

    def publish_weights(self) -> Published:
        return self.workers.publish_weights()

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        return self.workers.generate_sequences(prompts, seed=seed, validate=validate, greedy=greedy)

    def exchange(
        self, requests: Sequence[Request], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[Completion]:
        # All ranks of an engine make the same call and get the same result.
        size = self.ranks_per_engine
        parts: list[list[Request]] = [[] for _ in range(self.num_ranks // size)]
        for request in requests:
            parts[request.affinity % len(parts)].append(request)
        if size > 1:  # their clocks differ, and so would the number of steps
            limit = FIXED
        of_ranks = [part for part in parts for _ in range(size)]
        completed = self.workers.exchange(of_ranks, limit, cancelled)
        return [completion for part in completed[::size] for completion in part]

    def divide(self, requests: Sequence[Request]) -> list[Request]:
        from rlctl.runtime.rollout.exchange import divide

        return divide(requests, self.num_ranks, self.ranks_per_engine)

    def end_exchange(self) -> None:
        self.workers.end_exchange()
