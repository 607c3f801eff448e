"""Protocols of an algorithm: a step in two halves on the controller, losses on the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, Protocol, Self

from torch import Tensor

from rlctl.recipes import schema
from rlctl.runtime.batch import Experience, Prompts, Rollouts, Scored
from rlctl.runtime.model.causal_lm import PolicyOutputs
from rlctl.runtime.roles import Roles
from rlctl.tracking.metrics import Metrics


@dataclass(frozen=True, eq=False)
class Loss:
    """A sum of losses and its divisor.

    It is never a mean: the worker divides once, by the total count of all ranks and micro-batches.
    `total` is a scalar with a graph. `count` is None for a loss that is not divided. `num_tokens`
    is the number of tokens that the loss covers; None: the unmasked ones of `response_mask`.
    """

    total: Tensor
    count: float | None
    metrics: Metrics
    num_tokens: float | None = None


class Needs(Flag):
    """Requirements of an algorithm or an advantage estimator, in addition to actor and reward."""

    NOTHING = 0
    CRITIC = auto()  # a critic and its values
    REFERENCE = auto()  # a reference policy
    ENGINE = auto()  # a rollout engine in the actor
    GROUPS = auto()  # mini-batches with a group of `rollout.n` rows for each prompt
    COMPARISON = auto()  # groups of at least two rows: responses to one prompt are compared
    GREEDY_BASELINE = auto()  # the score of one greedy response to each prompt
    COMPONENTS = auto()  # the components of the reward
    ENTROPY = auto()  # the entropy of the policy in the update
    SUM_PI_SQUARED = auto()  # Σ_v π(v)² and the log-probs before the update


class PolicyLoss(Protocol):
    """The actor's loss; pickled to the actor's workers once."""

    @property
    def needs(self) -> Needs:
        """Roles and inputs that the algorithm uses."""
        ...

    def loss(self, outputs: PolicyOutputs, batch: Rollouts) -> Loss:
        """Return the loss of a micro-batch; `outputs` hold (T,) for its response tokens."""
        ...


class ValueLoss(Protocol):
    """The critic's loss; pickled to the critic's workers once."""

    def value_loss(self, values: Tensor, batch: Rollouts) -> Loss:
        """Return the loss of a micro-batch; `values` (T,) are those of its response tokens."""
        ...


class Algorithm(PolicyLoss, Protocol):
    """Training algorithm, found by an entry point of `rlctl.algorithms` or as `module:Name`."""

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int) -> Self:
        """Build the algorithm, once per run, on the controller.

        `num_steps` is the length of the run. Raises ConfigError with all conflicting settings.
        """
        ...

    def collect(self, prompts: Prompts, roles: Roles, step: int) -> Scored:
        """Run the first half of a step: return scored responses to `prompts`."""
        ...

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """Run the second half of a step: update the roles with `scored` and return metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state that changes between steps; it is saved in checkpoints."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...


def training_temperature(needs: Needs, rollout: schema.Rollout) -> float:
    """Return the temperature of the trained policy: that of sampling if it learns from samples."""
    return rollout.temperature if Needs.GROUPS in needs else 1.0


def mini_batches(
    experience: Experience, num_rows: int, epochs: int, seed: int | None
) -> Sequence[Experience]:
    """Return `epochs` passes over a batch in mini-batches of `num_rows` rows.

    Each epoch is shuffled with its own seed, derived from `seed`; None keeps the order.
    """
    import torch

    cuts: list[Tensor] = []
    for epoch in range(epochs):
        order = torch.arange(len(experience))
        if seed is not None:
            order = torch.randperm(
                len(experience), generator=torch.Generator().manual_seed(seed + epoch)
            )
        cuts += order.split(num_rows)
    return experience.chunk(cuts) if len(cuts) > 1 else [experience]
