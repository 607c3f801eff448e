"""Base of actors that extend some calls of another actor."""

from __future__ import annotations

from pathlib import Path

from rlctl.runtime.batch import LogProbs, Prompts, Rollouts
from rlctl.runtime.budget import OomRetry
from rlctl.runtime.roles import Actor, Published
from rlctl.tracking.metrics import Metrics


class DelegatingActor(Actor):
    """Base of actors that extend some calls of another actor and delegate the rest."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def update_weights(self) -> None:
        """See `Actor`."""
        self.actor.update_weights()

    def publish_weights(self) -> Published:
        """See `Actor`."""
        return self.actor.publish_weights()

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        """See `Actor`."""
        return self.actor.generate_sequences(prompts, seed=seed, validate=validate, greedy=greedy)

    def compute_log_probs(self, batch: Rollouts) -> LogProbs:
        """See `Actor`."""
        return self.actor.compute_log_probs(batch)

    def compute_base_log_probs(self, batch: Rollouts, top_k: int = 0) -> LogProbs:
        """See `Actor`."""
        return self.actor.compute_base_log_probs(batch, top_k)

    def compute_average_log_probs(self, batch: Rollouts, top_k: int = 0) -> LogProbs:
        """See `Actor`."""
        return self.actor.compute_average_log_probs(batch, top_k)

    def update_average(self, decay: float) -> None:
        """See `Actor`."""
        self.actor.update_average(decay)

    def update(self, batch: Rollouts, lr: float) -> Metrics:
        """See `Actor`."""
        return self.actor.update(batch, lr)

    def save(self, folder: Path) -> None:
        """See `LearningRole`."""
        self.actor.save(folder)

    def state_bytes(self) -> int:
        """See `LearningRole`."""
        return self.actor.state_bytes()

    def load(self, folder: Path) -> None:
        """See `LearningRole`."""
        self.actor.load(folder)

    def export(self, folder: Path) -> None:
        """See `Actor`."""
        self.actor.export(folder)

    def pop_oom_retries(self) -> list[OomRetry]:
        """See `ModelRole`."""
        return self.actor.pop_oom_retries()
