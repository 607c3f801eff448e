"""Protocols of the roles that an algorithm calls.

Implemented by workers in this process, by handles of worker groups on a cluster, and by wrappers
that time or check the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from rlctl.errors import InternalError, RlctlError
from rlctl.recipes.role_table import ACTOR, CRITIC, REFERENCE, REWARD_LEARNER, REWARD_MODEL, Role
from rlctl.runtime.base.batch import LogProbs, Prompts, Ragged, Rollouts, Scores
from rlctl.runtime.base.budget import OomRetry
from rlctl.runtime.base.metrics import Metrics

REFUSED = "actor/refused_updates"  # metric of an update that took no step

G = TypeVar("G", bound=Rollouts)
R = TypeVar("R")


class ModelRole(Protocol):
    """Role that holds a model; one of the table in `recipes/role_table.py`."""

    def pop_oom_retries(self) -> list[OomRetry]:
        """Return the reductions of the micro-batch limit since the last call."""
        ...


class LearningRole(ModelRole, Protocol):
    """Role whose weights are trained and saved in checkpoints."""

    def check_folder(self, folder: Path) -> None:
        """Raise ConfigError on a machine that does not have the `folder` of checkpoints."""
        ...

    def mark_step(self) -> None:
        """Let `save` write the present random state until the next call, or until `load`."""
        ...

    def save(self, folder: Path, export: Path | None, contents: Sequence[str]) -> None:
        """Copy the `contents` and random state; write them to `folder` in the background.

        Also write the weights to the folder `export` in transformers format, without a tokenizer;
        it is complete before `folder`.
        """
        ...

    def state_bytes(self) -> int:
        """Return the bytes that `save` writes."""
        ...

    def load(self, folder: Path, with_optimizer: bool = True) -> None:
        """Restore what `save` wrote, with or without the state of the optimizer."""
        ...


class LostEnginesError(RlctlError):
    """All engines with the published weights are lost, before the next ones are published."""


@dataclass(frozen=True)
class Published:
    """Weights that engines may load: their version (see `Completion`) and the bytes of a load."""

    version: int
    num_bytes: int = 0


# Weights of the policy: as they are, without the LoRA adapters, or their moving average.
Weights = Literal["current", "base", "average"]


class Generator(Protocol):
    """Generates responses with engines, which get the policy's weights."""

    def update_weights(self) -> None:
        """Sync the policy's weights to the rollout engine and wake it.

        Call it before every `generate_sequences`. Transfers nothing where the engine's weights are
        current.
        """
        ...

    def publish_weights(self) -> Published:
        """Let `update_weights` load the weights of this moment until the next call.

        For training beside generation. In the trainer's processes, where nothing learns between
        `update_weights` and `generate_sequences`, engines load no bytes.
        """
        ...

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        """Return n responses for each of B prompts: B·n rows, the responses of a prompt adjacent.

        n is `rollout.n`, or `rollout.val_kwargs.n` with `validate`, or 1 with `greedy`, which
        decodes greedily whatever the config says. Raises InternalError when the engine's weights
        are stale.
        """
        ...


# Sums numbers (N,) float64 over the workers, which all call it.
Total = Callable[[Tensor], Tensor]


class Actor(LearningRole, Protocol):
    """The policy, which learns."""

    def compute_log_probs(
        self, batch: Rollouts, weights: Weights = "current", top_k: int = 0
    ) -> LogProbs:
        """Return log-probs of the response tokens, and entropies under the current weights.

        Other weights serve as a `Reference`: `base` are those with the LoRA adapters disabled, the
        policy's if it has none; `average` is the moving average, of `Needs.AVERAGE`. With these
        also the `top_k` most probable tokens at each position, and their log-probs.
        """
        ...

    def map_groups(self, batch: G, function: Callable[[G, Total], R]) -> R:
        """Return `function` of the batch, called on each worker with some of its groups.

        Its result is a batch, a ragged field or metrics, or a tuple of those.
        """
        return function(batch, lambda numbers: numbers)

    def update_average(self, decay: float) -> None:
        """Replace the average by `decay`·average + (1 − `decay`)·weights."""
        ...

    def update(self, batch: Rollouts, lr: float, max_probs_diff: float | None = None) -> Metrics:
        """Take one optimizer step on one mini-batch.

        For a batch without old log-probs, `max_probs_diff` bounds the mean of |π_engine −
        π_trainer| over its tokens. Above it no step is taken, and the metrics have `REFUSED`.
        """
        ...

    def update_with_log_probs(
        self, batch: Rollouts, lr: float, max_probs_diff: float | None = None
    ) -> tuple[LogProbs, Metrics]:
        """Take the same step as `update`; also return the log-probs before it."""
        ...


class Reference(ModelRole, Protocol):
    """The policy of the KL penalty, or a teacher."""

    def compute_log_probs(self, batch: Rollouts, top_k: int = 0) -> LogProbs:
        """Return the log-probs of the response tokens, without entropies.

        Also the `top_k` most probable tokens at each position, and their log-probs.
        """
        ...


class Critic(LearningRole, Protocol):
    """The value function."""

    def compute_values(self, batch: Rollouts) -> Ragged:
        """Return the value of the state before each response token: B rows, float32."""
        ...

    def update(self, batch: Rollouts, lr: float) -> Metrics:
        """Take one optimizer step on one mini-batch."""
        ...


class RewardModel(ModelRole, Protocol):
    """A model that scores conversations."""

    def compute_rewards(self, batch: Rollouts) -> Ragged:
        """Return the score of each row, prompt and response as one conversation.

        One value in each of B rows, float32.
        """
        ...


class RewardLearner(RewardModel, LearningRole, Protocol):
    """A reward model that is trained."""

    def update(self, batch: Rollouts, lr: float) -> Metrics:
        """Take one optimizer step on one mini-batch."""
        ...

    def set_scale(self, mean: float, std: float) -> None:
        """Write mean and standard deviation of the scores into the exported config.json."""
        ...


class Reward(Protocol):
    """The reward functions or models of a run."""

    def compute_scores(self, rollouts: Rollouts, validate: bool = False) -> Scores:
        """Return one score per response: (B,).

        With `validate`, the state that `state_dict` returns does not change.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes between steps; it is saved in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class Roles:
    """The roles of one run: those that the algorithm and its config need.

    The properties raise InternalError where the algorithm did not declare the need.
    """

    actor_role: Actor | None
    reward: Reward
    critic_role: Critic | None = None
    reference_role: Reference | None = None
    reward_model_role: RewardModel | None = None
    reward_learner_role: RewardLearner | None = None
    generator_role: Generator | None = None
    max_probs_diff: float | None = None  # of engine and trainer; see `algorithms.mismatch`

    @property
    def actor(self) -> Actor:
        """The policy; InternalError in a run that trains a reward model."""
        if self.actor_role is None:
            raise InternalError("the algorithm uses an actor, and declares Needs.REWARD_LEARNER")
        return self.actor_role

    @property
    def generator(self) -> Generator:
        """The generator of responses; InternalError where there is none."""
        if self.generator_role is None:
            raise InternalError("the algorithm generates without declaring Needs.ENGINE")
        return self.generator_role

    @property
    def reward_learner(self) -> RewardLearner:
        """The reward model that is trained; InternalError where there is none."""
        if self.reward_learner_role is None:
            raise InternalError(
                "the algorithm trains a reward model without declaring Needs.REWARD_LEARNER"
            )
        return self.reward_learner_role

    @property
    def critic(self) -> Critic:
        """The critic; InternalError where there is none."""
        if self.critic_role is None:
            raise InternalError("the algorithm uses a critic without declaring Needs.CRITIC")
        return self.critic_role

    @property
    def reference(self) -> Reference:
        """The reference; InternalError where there is none."""
        if self.reference_role is None:
            raise InternalError("the algorithm uses a reference without declaring Needs.REFERENCE")
        return self.reference_role

    def models(self) -> dict[Role, ModelRole]:
        """Return the roles of this run that hold a model, by their row of the table."""
        roles: dict[Role, ModelRole | None] = {
            **self._learning(),
            REFERENCE: self.reference_role,
            REWARD_MODEL: self.reward_model_role,
        }
        return {role: member for role, member in roles.items() if member is not None}

    def learning(self) -> dict[Role, LearningRole]:
        """Return the roles of this run that learn: those that a checkpoint holds."""
        return {role: member for role, member in self._learning().items() if member is not None}

    def trained(self) -> LearningRole:
        """Return the role whose model is the result of the run."""
        return self.actor if self.reward_learner_role is None else self.reward_learner_role

    def _learning(self) -> dict[Role, LearningRole | None]:
        return {
            ACTOR: self.actor_role,
            CRITIC: self.critic_role,
            REWARD_LEARNER: self.reward_learner_role,
        }
