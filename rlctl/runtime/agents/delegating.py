"""Base of actors that extend some calls of another actor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlctl.runtime.batch import LogProbs, Prompts, Rollouts
from rlctl.runtime.budget import OomRetry
from rlctl.runtime.roles import Actor, G, Published, R, Total, Weights
from rlctl.tracking.metrics import Metrics


class DelegatingActor(Actor):
    """Base of actors that extend some calls of another actor and delegate the rest."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def update_weights(self) -> None:
        self.actor.update_weights()

    def publish_weights(self) -> Published:
        return self.actor.publish_weights()

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        return self.actor.generate_sequences(prompts, seed=seed, validate=validate, greedy=greedy)

    def compute_log_probs(
        self, batch: Rollouts, weights: Weights = "current", top_k: int = 0
    ) -> LogProbs:
        return self.actor.compute_log_probs(batch, weights, top_k)

    def update_average(self, decay: float) -> None:
        self.actor.update_average(decay)

    def map_groups(self, batch: G, function: Callable[[G, Total], R]) -> R:
        return self.actor.map_groups(batch, function)

    def update(self, batch: Rollouts, lr: float, max_probs_diff: float | None = None) -> Metrics:
        return self.actor.update(batch, lr, max_probs_diff)

    def update_with_log_probs(
        self, batch: Rollouts, lr: float, max_probs_diff: float | None = None
    ) -> tuple[LogProbs, Metrics]:
        return self.actor.update_with_log_probs(batch, lr, max_probs_diff)

    def mark_step(self) -> None:
        self.actor.mark_step()

    def save(self, folder: Path, export: Path | None = None) -> None:
        self.actor.save(folder, export)

    def check_folder(self, folder: Path) -> None:
        self.actor.check_folder(folder)

    def state_bytes(self) -> int:
        return self.actor.state_bytes()

    def load(self, folder: Path) -> None:
        self.actor.load(folder)

    def pop_oom_retries(self) -> list[OomRetry]:
        return self.actor.pop_oom_retries()
