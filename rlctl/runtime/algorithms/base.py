"""Protocols of an algorithm: a step in two halves on the controller, losses on the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from rlctl.data_prep.rows import PromptRow
from rlctl.plugins import Params
from rlctl.plugins.result_check import check_result
from rlctl.recipes import schema
from rlctl.runtime.algorithms.lr_schedule import Schedule
from rlctl.runtime.base.batch import Experience, Prompts, Rollouts, Scored
from rlctl.runtime.base.metrics import Metrics
from rlctl.runtime.base.ops import PolicyOutputs, ceil_div
from rlctl.runtime.base.roles import Roles

if TYPE_CHECKING:
    from rlctl.data_prep.row_fields import RowField

P = TypeVar("P", bound=Params)


@dataclass(frozen=True, eq=False)
class Loss:
    """A sum of losses and its divisor.

    It is never a mean: the worker divides once, by the total count of all ranks and micro-batches.
    `total` is a scalar with a graph. `count` is None for a loss that is not divided. `num_tokens`
    is the number of tokens that the loss covers; None: the unmasked ones of `response_mask`.
    `values` (T,) are log-probs of the pass that the caller of an update asks for.
    """

    total: Tensor
    count: float | None
    metrics: Metrics
    num_tokens: float | None = None
    values: Tensor | None = None


class Needs(Flag):
    """Requirements of an algorithm or an advantage estimator, in addition to actor and reward.

    `REWARD_LEARNER` takes the place of the actor: the run trains a reward model, and no policy.
    """

    NOTHING = 0
    CRITIC = auto()  # a critic and its values
    REFERENCE = auto()  # a reference policy
    AVERAGE = auto()  # the moving average of the policy's weights, as the reference
    REWARD_LEARNER = auto()  # a reward model that learns, and no actor
    ENGINE = auto()  # a rollout engine in the actor
    GROUPS = auto()  # mini-batches with a group of `rollout.n` rows for each prompt
    COMPARISON = auto()  # groups of at least two rows: responses to one prompt are compared
    GREEDY_BASELINE = auto()  # the score of one greedy response to each prompt
    COMPONENTS = auto()  # the components of the reward
    ENTROPY = auto()  # the entropy of the policy in the update
    SUM_PI_SQUARED = auto()  # Σ_v π(v)² and the log-probs before the update
    SIZES = auto()  # the sizes of a mini-batch in its loss


class PolicyLoss(Protocol):
    """The actor's loss; pickled to the actor's workers once."""

    @property
    def needs(self) -> Needs:
        """Roles and inputs that the algorithm uses."""
        ...

    def loss(self, outputs: PolicyOutputs, batch: Rollouts) -> Loss:
        """Return the loss of a micro-batch; `outputs` hold (T,) for its response tokens."""
        ...


class ScoreLoss(Protocol):
    """The loss of a reward model; pickled to its workers once."""

    def score_loss(self, scores: Tensor, batch: Rollouts) -> Loss:
        """Return the loss of a micro-batch; `scores` (B,) are those of its rows."""
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


def row_fields(algorithm: object) -> Sequence[RowField]:
    """Return the fields of training rows that an algorithm reads: its attribute `row_fields`.

    All rows are checked before a run starts.
    """
    return getattr(algorithm, "row_fields", ())


@runtime_checkable
class RoutesRows(Protocol):
    """Algorithm that chooses a reference for each row."""

    @property
    def references(self) -> Mapping[str, schema.Model]:
        """Models of the references by name; empty: the configuration's reference grades all."""
        ...

    def reference_of(self, row: PromptRow) -> str:
        """Return the name of the row's reference. Raises ConfigError if there is none."""
        ...


def routed_models(algorithm: object) -> Mapping[str, schema.Model]:
    """Return the models between which an algorithm chooses; empty if it does not."""
    return algorithm.references if isinstance(algorithm, RoutesRows) else {}


class Stateless:
    """Base of algorithms, and parts of them, without state that changes between steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class PolicyAlgorithm(Stateless, Generic[P]):
    """Base of stateless algorithms that train the policy, on its responses by default."""

    actor: schema.Actor
    data: schema.Data
    model: schema.Model
    params: P
    seed: int
    schedule: Schedule

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int, params: P) -> Self:
        """Build the algorithm; `num_steps` is the length of the learning-rate schedule."""
        roles = config.actor_rollout_ref
        return cls(
            actor=roles.actor,
            data=config.data,
            model=roles.model,
            params=params,
            seed=sampling_seed(config),
            schedule=Schedule.from_config(roles.actor.optim, num_steps),
        )

    def collect(self, prompts: Prompts, roles: Roles, step: int) -> Scored:
        """Generate `rollout.n` responses to each prompt and score them."""
        return sample(prompts, roles, step_seed(self.seed, step))


# Keys that only the PPO family uses, as patterns for `unused_keys`.
PPO_KEYS = (
    "algorithm.adv_estimator*",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.use_kl_in_reward",
    "algorithm.kl_*",
    "algorithm.*pf_ppo*",
    "algorithm.overlong_buffer.*",
    "algorithm.rollout_correction.*",
    "actor_rollout_ref.actor.clip_ratio*",
    "actor_rollout_ref.actor.policy_loss.*",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.*kl_loss*",
)
AGGREGATION_KEYS = (
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.loss_scale_factor",
)


def sample(prompts: Prompts, roles: Roles, seed: int) -> Scored:
    """Generate `rollout.n` responses to each prompt with the current policy, and score them."""
    rollouts = generate(prompts, roles, seed)
    return roles.reward.compute_scores(rollouts).to_scored(rollouts)


def generate(
    prompts: Prompts, roles: Roles, seed: int, validate: bool = False, greedy: bool = False
) -> Rollouts:
    """Return responses of the policy as it is now: see `Generator.generate_sequences`."""
    roles.generator.update_weights()
    function = roles.generator.generate_sequences
    rollouts = function(prompts, seed=seed, validate=validate, greedy=greedy)
    check_result(function, isinstance(rollouts, Rollouts), rollouts, "Rollouts")
    return rollouts


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step: no random state to save, and a resumed run repeats the draws."""
    return seed * 1_000_000_007 + step * 1_009


def sampling_seed(config: schema.Config) -> int:
    """Return the seed of sampled responses."""
    seed = config.actor_rollout_ref.rollout.seed
    return config.trainer.seed if seed is None else seed


def rows_per_prompt(config: schema.Config, needs: Needs) -> int:
    """Return the rows that a prompt of the data has in a batch: responses, or both of a pair."""
    if Needs.REWARD_LEARNER in needs:
        return 2
    return config.actor_rollout_ref.rollout.n if Needs.GROUPS in needs else 1


def training_temperature(needs: Needs, rollout: schema.Rollout) -> float:
    """Return the temperature of the trained policy: that of sampling if it learns from samples."""
    return rollout.temperature if Needs.GROUPS in needs else 1.0


def cut(experience: Experience, cuts: Sequence[Tensor]) -> Sequence[Experience]:
    """Return the mini-batches of rows `cuts`, (N,) int64 each; one has all rows in their order."""
    return experience.chunk(cuts) if len(cuts) > 1 else [experience]


def mini_batch_rows(
    experience: Experience, rows_per_prompt: int, role: schema.Updates, step: int
) -> list[Tensor]:
    """Return the rows of each mini-batch, (N,) int64, of `ppo_epochs` passes over a batch.

    A batch that lacks rows, or has episodes with several, is cut between groups.
    """
    group = experience.group
    size = role.ppo_mini_batch_size
    sizes = group.unique(return_counts=True)[1]
    if len(sizes) % size or bool((sizes != rows_per_prompt).any()):
        return list(rows_of_groups(group, group, role, step))
    rows = torch.arange(len(group))
    seed = _shuffle_seed(role, step)
    return group_batches(rows, size * rows_per_prompt, role.ppo_epochs, seed)


def rows_of_groups(
    groups: Tensor, kept: Tensor, role: schema.Updates, step: int
) -> Iterator[Tensor]:
    """Yield the rows of each mini-batch of groups, (N,) int64, for `ppo_epochs` passes.

    `groups` (B,) are those of all rows of the step, and `kept` (K,) those of the rows to learn
    from, in which the rows are counted. Mini-batches without such a row are left out.
    """
    seed = _shuffle_seed(role, step)
    for part in group_batches(groups, role.ppo_mini_batch_size, role.ppo_epochs, seed):
        rows = torch.isin(kept, part).nonzero().flatten()
        if len(rows):
            yield rows


def _shuffle_seed(role: schema.Updates, step: int) -> int | None:
    return step_seed(role.data_loader_seed, step) if role.shuffle else None


def group_batches(group: Tensor, num_groups: int, epochs: int, seed: int | None) -> list[Tensor]:
    """Return the groups of each mini-batch, (N,) int64, for `epochs` passes.

    `group` (B,) are those of the rows. If `num_groups` does not divide their number, mini-batches
    are about as large and equal up to one group, so that no step is taken on a small remainder.
    Each epoch is shuffled with another seed, derived from `seed`; None keeps the order.
    """
    groups = group.unique()
    count = max(1, ceil_div(2 * len(groups) - num_groups, 2 * num_groups))  # rounds a half down
    batches: list[Tensor] = []
    for epoch in range(epochs):
        order = torch.arange(len(groups))
        if seed is not None:
            draw = torch.Generator().manual_seed(seed + epoch)
            order = torch.randperm(len(groups), generator=draw)
        batches += groups[order].tensor_split(count)
    return batches
