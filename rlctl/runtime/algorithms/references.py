"""References that are not one frozen model: the weights of the actor, and a model for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.runtime.base.batch import LogProbs, Rollouts
from rlctl.runtime.base.budget import OomRetry
from rlctl.runtime.base.roles import Actor, Reference, Weights


@dataclass(frozen=True)
class ActorAsReference(Reference):
    """Reference that the actor's workers serve, with other weights than those that learn."""

    actor: Actor
    weights: Weights

    def compute_log_probs(self, batch: Rollouts, top_k: int = 0) -> LogProbs:
        return self.actor.compute_log_probs(batch, self.weights, top_k)

    def pop_oom_retries(self) -> list[OomRetry]:
        """Return an empty list: the actor reports its OOM retries."""
        return []


@dataclass(frozen=True)
class RoutedReference(Reference):
    """Several references, of which `reference_of` names that of a row."""

    members: Mapping[str, Reference]
    reference_of: Callable[[PromptRow], str]

    def compute_log_probs(self, batch: Rollouts, top_k: int = 0) -> LogProbs:
        """Return the log-probs of each row under its reference, in the order of the rows."""
        rows: dict[str, list[int]] = {}
        for number, row in enumerate(batch.rows):
            rows.setdefault(self.reference_of(row), []).append(number)
        parts = [
            self.members[name].compute_log_probs(batch.select(torch.tensor(numbers)), top_k)
            for name, numbers in rows.items()
        ]
        order = torch.tensor([number for numbers in rows.values() for number in numbers])
        return LogProbs.concat(parts).select(order.argsort())

    def pop_oom_retries(self) -> list[OomRetry]:
        """Return those of all references."""
        return [retry for member in self.members.values() for retry in member.pop_oom_retries()]
