"""An actor in two pools: one learns, the other answers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rlctl.runtime.batch import Prompts, Rollouts
from rlctl.runtime.roles import Actor
from rlctl.tracking.metrics import Metrics


class Engines(Protocol):
    """Engines in processes of their own, which fetch the weights they lack before they answer."""

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts: ...

    def update_weights(self) -> None: ...

    def mark_stale(self) -> None: ...


class DisaggregatedActor:
    """Implements `Actor`: `trainer` learns, `engines` answer under its present weights."""

    def __init__(self, trainer: Actor, engines: Engines) -> None:
        self.trainer = trainer
        self.engines = engines
        self.compute_log_probs = trainer.compute_log_probs
        self.compute_base_log_probs = trainer.compute_base_log_probs
        self.save = trainer.save
        self.state_bytes = trainer.state_bytes
        self.export = trainer.export
        self.pop_oom_retries = trainer.pop_oom_retries
        self.generate_sequences = engines.generate_sequences
        self.update_weights = engines.update_weights

    def update(self, batch: Rollouts, lr: float) -> Metrics:
        """See `Actor`."""
        self.engines.mark_stale()
        return self.trainer.update(batch, lr)

    def load(self, folder: Path) -> None:
        """See `Actor`."""
        self.engines.mark_stale()
        self.trainer.load(folder)
