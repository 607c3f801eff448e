"""Engines with a separate pool: they get the weights of the trainer in another pool."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlctl.errors import RlctlError
from rlctl.runtime.base.batch import Prompts, Rollouts
from rlctl.runtime.base.clock import timed
from rlctl.runtime.base.roles import LostEnginesError, Published
from rlctl.runtime.cluster.fair_lock import FairLock
from rlctl.runtime.generation.policy_engines import Engines
from rlctl.runtime.rollout.engine import in_order, to_requests, to_responses
from rlctl.runtime.rollout.exchange import complete, divide
from rlctl.runtime.rollout.requests import Completion, Request, Slice
from rlctl.runtime.rollout.sampling_params import to_rollouts
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.interrupts import INTERRUPTS

if TYPE_CHECKING:  # imports Ray
    from rlctl.runtime.cluster.engine_group import EngineGroup

_PAUSE_S = 0.1  # between two looks for an engine


class SeparateEngines(Engines):
    """Engines of a group that generate under the weights of `trainer`, which learns.

    With `ahead`, engines generate during training, under the weights of `publish_weights`. With
    `in_flight`, they get them while responses are open, which wait if all engines are lost.
    """

    are_separate = True

    def __init__(
        self,
        trainer: ActorWorker,
        engines: EngineGroup,
        *,
        ahead: bool = False,
        in_flight: bool = False,
    ) -> None:
        self.trainer = trainer
        trainer.before_change = self._end_weights
        self.engines = engines
        self.ahead = ahead or in_flight
        self.in_flight = in_flight
        self._lock = FairLock("wait_rollouts")  # of exchanges during training

    def num_engines(self) -> int:
        """Return the number of engines that get new requests, of which some may be down."""
        return sum(not engine.draining for engine in self.engines.pool.engines)

    def update_weights(self) -> None:
        """See `Generator`. Every stale engine gets the trainer's weights, unless it is learning."""
        with INTERRUPTS.held(), self._lock, timed("update_weights"):
            self.engines.update_weights(self.trainer.send_weights)

    def publish_weights(self) -> Published:
        """See `Generator`. An engine that restarts while the trainer learns gets the next weights.

        Engines must be idle, unless they load weights `in_flight`.
        """
        with INTERRUPTS.held(), self._lock, timed("update_weights"):
            num_bytes = self.engines.broadcast(self.trainer.send_weights)
            return replace(self.trainer.publish_weights(), num_bytes=num_bytes)

    @timed("gen")
    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        spec = self.engines.spec
        params = spec.sampling.params(prompts.group, seed, validate, greedy, prompts.images)
        length = spec.max_prompt_length + spec.sampling.max_response_length
        requests = to_requests(prompts.prompt_ids, params, length)
        completions = complete(self.divide(requests), self.exchange)
        return to_rollouts(prompts, params.n, to_responses(in_order(requests, completions)))

    def exchange(
        self, requests: Sequence[Request], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[Completion]:
        with self._lock:
            try:
                return self.engines.exchange(requests, limit, cancelled)
            except RlctlError as error:
                if not (self.in_flight and isinstance(error, LostEnginesError)):
                    self.engines.unplaced.clear()
                    raise
        time.sleep(_PAUSE_S)
        return []

    def divide(self, requests: Sequence[Request]) -> list[Request]:
        return divide(requests, self.num_engines())

    def end_exchange(self) -> None:
        """See `TurnEngines`. The engines keep their memory: they share it with no other role."""

    def _end_weights(self) -> None:
        """Let engines get the trainer's present weights no more: it is about to change them."""
        if self.ahead:
            self.engines.end_broadcasts()
        else:
            self.engines.mark_stale()
