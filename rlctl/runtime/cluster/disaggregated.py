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
    from rlctl.runtime.cluster.engine_group import EngineGroup


class DisaggregatedActor(DelegatingActor):
    """Actor whose `trainer` learns and whose `engines` generate under the trainer's weights."""

    def __init__(self, trainer: ActorWorker, engines: EngineGroup) -> None:
        super().__init__(trainer)
        self.trainer = trainer
        self.engines = engines

    def update_weights(self) -> None:
        """See `Actor`. The trainer's ranks send their weights to every stale engine."""
        self.engines.update_weights(self.trainer.send_weights)

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
        self.engines.mark_stale()
        return self.trainer.update(batch, lr)

    def load(self, folder: Path) -> None:
        """See `LearningRole`."""
        self.engines.mark_stale()
        self.trainer.load(folder)
