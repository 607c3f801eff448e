"""What an algorithm can ask for. A role is a protocol; a worker in this process or a group of workers on a cluster answers it alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlctl.errors import InternalError
from rlctl.recipes.roles import ACTOR, CRITIC, REFERENCE, Role
from rlctl.runtime.batch import LogProbs, Prompts, Ragged, Rollouts, Scores
from rlctl.runtime.budget import OomRetry
from rlctl.tracking.metrics import Metrics


class ModelRole(Protocol):
    """A role of the table in `recipes/roles.py`: it holds a model."""

    def pop_oom_retries(self) -> list[OomRetry]:
        """Return the reductions of the micro-batch limit since the last call."""
        ...


class LearningRole(ModelRole, Protocol):
    """A role whose weights are trained and saved in checkpoints."""

    def save(self, folder: Path) -> None:
        """Copy weights, optimizer and random state, and write them to `folder` in the background."""
        ...

    def state_bytes(self) -> int:
        """Return the bytes that `save` writes."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...


class Actor(LearningRole, Protocol):
    """The policy: it answers prompts and learns."""

    def update_weights(self) -> None:
        """Hand the present weights to the rollout engine, if it does not have them. `generate_sequences` does so where nobody has asked."""
        ...

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        """Answer B prompts, `rollout.n` times each (`rollout.val_kwargs.n` with `validate`): B·n rows, answers of a prompt side by side.

        `greedy`: one greedy answer each, whatever the configuration says.
        """
        ...

    def compute_log_probs(self, batch: Rollouts) -> LogProbs:
        """Log-probs and entropies of the response tokens under the present weights."""
        ...

    def compute_base_log_probs(self, batch: Rollouts) -> LogProbs:
        """Log-probs under the model that the adapters are trained beside, without entropies. Without adapters it is the policy itself."""
        ...

    def update(self, batch: Rollouts, lr: float) -> Metrics:
        """One optimizer step on one mini-batch."""
        ...

    def export(self, folder: Path) -> None:
        """Copy the weights, and write a transformers folder (without tokenizer) in the background, before what is saved later."""
        ...


class Reference(ModelRole, Protocol):
    """The frozen policy that the KL penalty is measured against."""

    def compute_log_probs(self, batch: Rollouts) -> LogProbs: ...


class Critic(LearningRole, Protocol):
    """The value function."""

    def compute_values(self, batch: Rollouts) -> Ragged:
        """The value before each response token is written."""
        ...

    def update(self, batch: Rollouts, lr: float) -> Metrics:
        """One optimizer step on one mini-batch."""
        ...


class Reward(Protocol):
    """What an answer is worth."""

    def compute_scores(self, rollouts: Rollouts) -> Scores: ...


@dataclass(frozen=True)
class Roles:
    """The roles of one run. Only those that the algorithm and its config need are there; asking for another is a defect."""

    actor: Actor
    reward: Reward
    critic_role: Critic | None = None
    reference_role: Reference | None = None

    @property
    def critic(self) -> Critic:
        if self.critic_role is None:
            raise InternalError("the algorithm asks for a critic that it did not declare")
        return self.critic_role

    @property
    def reference(self) -> Reference:
        if self.reference_role is None:
            raise InternalError("the algorithm asks for a reference that it did not declare")
        return self.reference_role

    def models(self) -> dict[Role, ModelRole]:
        """Return the roles of this run that hold a model, by their row of the table."""
        roles = {ACTOR: self.actor, CRITIC: self.critic_role, REFERENCE: self.reference_role}
        return {role: member for role, member in roles.items() if member is not None}

    def learning(self) -> dict[Role, LearningRole]:
        """Return the roles of this run that learn: those that a checkpoint holds."""
        roles = {ACTOR: self.actor, CRITIC: self.critic_role}
        return {role: member for role, member in roles.items() if member is not None}
