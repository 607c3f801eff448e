"""Actor in two pools: one trains, the engines of the other generate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.runtime.agents.delegating import DelegatingActor
from rlctl.runtime.batch import LogProbs, Prompts, Rollouts
from rlctl.runtime.cluster.fair_lock import FairLock
from rlctl.runtime.model.engine_weights import Selection
from rlctl.runtime.roles import Published
from rlctl.runtime.rollout.requests import Completion, Request, Slice
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.tracking.clock import phase, timed
from rlctl.tracking.metrics import Metrics

if TYPE_CHECKING:  # imports Ray
    from rlctl.runtime.cluster.channels import PublishedWeights
    from rlctl.runtime.cluster.engine_group import EngineGroup


class DisaggregatedActor(DelegatingActor):
    """Actor whose `trainer` learns and whose `engines` generate under the trainer's weights.

    Once weights were published, engines generate under the published ones, beside training. With
    `in_flight`, they get them from the trainer while responses are open.
    """

    def __init__(
        self, trainer: ActorWorker, engines: EngineGroup, *, in_flight: bool = False
    ) -> None:
        super().__init__(trainer)
        self.trainer = trainer
        self.engines = engines
        self.in_flight = in_flight
        self.published: PublishedWeights | None = None
        self.frozen: PublishedWeights | None = None  # parameters that are published once
        self._lock = FairLock("wait_rollouts")  # of exchanges beside the trainer's thread

    def num_engines(self) -> int:
        """Return the number of engines that get new requests, of which some may be down."""
        return sum(not engine.draining for engine in self.engines.pool.engines)

    def update_weights(self) -> None:
        """See `Actor`. Every stale engine gets the trainer's weights, or the published ones."""
        with self._lock, phase("update_weights"):
            self.engines.update_weights(self.published or self.trainer.send_weights)

    def publish_weights(self) -> Published:
        """See `Actor`. A restarted engine also gets the published weights.

        Engines must be idle, unless they load weights `in_flight`: then one that restarts while the
        trainer learns waits for the next weights.
        """
        if not self.in_flight:
            return self._store_weights()
        with self._lock, phase("update_weights"):
            num_bytes = self.engines.broadcast(self.trainer.send_weights)
            return replace(self.trainer.publish_weights(), num_bytes=num_bytes)

    @timed("update_weights")
    def _store_weights(self) -> Published:
        """Publish the weights in Ray's object store."""
        from rlctl.runtime.cluster.channels import PublishedWeights, PublishingChannel

        num_frozen_bytes = 0
        if self.frozen is None:
            frozen = self.trainer.send_weights(PublishingChannel(Selection.FROZEN))
            self.frozen = PublishedWeights.join(frozen)
            num_frozen_bytes = self.frozen.num_bytes
        parts = self.trainer.send_weights(PublishingChannel(Selection.CHANGING))
        published = replace(PublishedWeights.join(parts), frozen=self.frozen.buckets)
        self.published = published
        self.engines.mark_stale()
        return Published(published.version, num_frozen_bytes + published.num_bytes)

    @timed("gen")
    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        return self.engines.generate_sequences(prompts, seed=seed, validate=validate, greedy=greedy)

    def exchange(
        self, requests: Sequence[Request], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[Completion]:
        with self._lock:
            return self.engines.exchange(requests, limit, cancelled)

    def end_exchange(self) -> None:
        """See `TurnEngines`. The engines keep their memory: they share it with no other role."""

    def update(self, batch: Rollouts, lr: float, max_probs_diff: float | None = None) -> Metrics:
        self._end_weights()
        return self.trainer.update(batch, lr, max_probs_diff)

    def update_with_log_probs(
        self, batch: Rollouts, lr: float, max_probs_diff: float | None = None
    ) -> tuple[LogProbs, Metrics]:
        self._end_weights()
        return self.trainer.update_with_log_probs(batch, lr, max_probs_diff)

    def _end_weights(self) -> None:
        """Let engines get the trainer's present weights no more: it is about to change them."""
        if self.in_flight:
            self.engines.end_broadcasts()
        elif self.published is None:
            self.engines.mark_stale()

    def load(self, folder: Path) -> None:
        self.published = None
        self.engines.mark_stale()
        self.trainer.load(folder)
