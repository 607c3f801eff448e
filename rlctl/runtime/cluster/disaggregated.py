"""Actor in two pools: one trains, the engines of the other generate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.runtime.batch import Prompts, Rollouts
from rlctl.runtime.roles import DelegatingActor
from rlctl.runtime.rollout.requests import Completion, Request, Slice
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.tracking.metrics import Metrics

if TYPE_CHECKING:  # imports Ray
    from rlctl.runtime.cluster.channels import PublishedWeights
    from rlctl.runtime.cluster.engine_group import EngineGroup


class DisaggregatedActor(DelegatingActor):
    """Actor whose `trainer` learns and whose `engines` generate under the trainer's weights.

    Once weights were published, engines generate under the published ones, beside training.
    """

    def __init__(self, trainer: ActorWorker, engines: EngineGroup) -> None:
        super().__init__(trainer)
        self.trainer = trainer
        self.engines = engines
        self.published: PublishedWeights | None = None

    def num_engines(self) -> int:
        """Return the number of engines that get new requests, of which some may be down."""
        return sum(not engine.draining for engine in self.engines.pool.engines)

    def update_weights(self) -> None:
        """See `Actor`. Every stale engine gets the trainer's weights, or the published ones."""
        published = self.published
        self.engines.update_weights(
            self.trainer.send_weights if published is None else published.send
        )

    def publish_weights(self) -> int:
        """See `Actor`. Engines must be idle. A restarted engine gets the published weights, too."""
        from rlctl.runtime.cluster.channels import PublishingChannel

        self.published = self.trainer.send_weights(PublishingChannel())
        self.engines.mark_stale()
        return self.published.num_bytes if self.published else 0

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        """See `Actor`."""
        return self.engines.generate_sequences(prompts, seed=seed, validate=validate, greedy=greedy)

    def exchange(
        self, requests: Sequence[Request], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[Completion]:
        """See `TurnEngines`."""
        return self.engines.exchange(requests, limit, cancelled)

    def end_exchange(self) -> None:
        """See `TurnEngines`. The engines keep their memory: they share it with no other role."""

    def update(self, batch: Rollouts, lr: float) -> Metrics:
        """See `Actor`."""
        if self.published is None:
            self.engines.mark_stale()
        return self.trainer.update(batch, lr)

    def load(self, folder: Path) -> None:
        """See `LearningRole`."""
        self.published = None
        self.engines.mark_stale()
        self.trainer.load(folder)
