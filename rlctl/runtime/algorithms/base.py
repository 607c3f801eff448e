"""What an algorithm is: two halves of a step that the controller runs, and a loss that the workers run."""

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
    """A sum and what it has to be divided by. Never a mean: only the worker divides, once, by the count of all ranks and micro-batches.

    `total` is a scalar with a graph; `count` is None for a loss that is a sum and is not divided at all.
    """

    total: Tensor
    count: float | None
    metrics: Metrics


class Needs(Flag):
    """Requirements of an algorithm or an advantage estimator, beside actor and reward."""

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
    """The mathematics that the actor's workers run; pickled to them once."""

    @property
    def needs(self) -> Needs: ...

    def loss(self, outputs: PolicyOutputs, batch: Rollouts) -> Loss:
        """Of a micro-batch: `outputs` hold (T,) for its response tokens."""
        ...


class ValueLoss(Protocol):
    """The mathematics that the critic's workers run; pickled to them once."""

    def value_loss(self, values: Tensor, batch: Rollouts) -> Loss:
        """Of a micro-batch: `values` (T,) for its response tokens."""
        ...


class Algorithm(PolicyLoss, Protocol):
    """One reinforcement-learning algorithm. Found by entry point `rlctl.algorithms` or `module:Name`."""

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int) -> Self:
        """Built once on the controller; raises `ConfigError` with everything that does not fit together."""
        ...

    def collect(self, prompts: Prompts, roles: Roles, step: int) -> Scored:
        """The first half of a step: ask, answer, score."""
        ...

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """The second half: make experience of it and learn."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What changes from step to step on the controller."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def mini_batches(
    experience: Experience, num_rows: int, epochs: int, seed: int | None
) -> Sequence[Experience]:
    """Cut a batch into mini-batches of `num_rows` rows, `epochs` times over, each epoch in another order if `seed` is given."""
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
