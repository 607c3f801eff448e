"""Roles whose calls are timed; the phase names are those of the `timing_s/*` metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlctl.runtime.agents.delegating import DelegatingActor
from rlctl.runtime.batch import LogProbs, Prompts, Ragged, Rollouts, Scores
from rlctl.runtime.budget import OomRetry
from rlctl.runtime.rewards.model_reward import ModelReward
from rlctl.runtime.roles import (
    Actor,
    Critic,
    Published,
    Reference,
    Reward,
    RewardLearner,
    RewardModel,
    Roles,
)
from rlctl.runtime.training.clock import Clock
from rlctl.tracking.metrics import Metrics


def timed_roles(roles: Roles, clock: Clock) -> Roles:
    """Return the roles with each call of a step timed as a phase on `clock`."""
    critic, reference = roles.critic_role, roles.reference_role
    reward, learner = roles.reward, roles.reward_learner_role
    if isinstance(reward, ModelReward):  # "reward" is then the rest: functions and tokenization
        reward = replace(reward, model=TimedRewardModel(reward.model, clock))
    return replace(
        roles,
        actor_role=TimedActor(roles.actor_role, clock) if roles.actor_role is not None else None,
        reward=TimedReward(reward, clock),
        critic_role=TimedCritic(critic, clock) if critic is not None else None,
        reference_role=TimedReference(reference, clock) if reference is not None else None,
        reward_learner_role=TimedRewardLearner(learner, clock) if learner is not None else None,
    )


class TimedActor(DelegatingActor):
    """Actor that times weight sync, generation, log-probs and updates."""

    def __init__(self, actor: Actor, clock: Clock) -> None:
        super().__init__(actor)
        self.clock = clock

    def update_weights(self) -> None:
        with self.clock.phase("update_weights"):
            self.actor.update_weights()

    def publish_weights(self) -> Published:
        with self.clock.phase("update_weights"):
            return self.actor.publish_weights()

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        with self.clock.phase("gen"):
            return self.actor.generate_sequences(
                prompts, seed=seed, validate=validate, greedy=greedy
            )

    def compute_log_probs(self, batch: Rollouts) -> LogProbs:
        with self.clock.phase("old_log_prob"):
            return self.actor.compute_log_probs(batch)

    def update(self, batch: Rollouts, lr: float, max_probs_diff: float | None = None) -> Metrics:
        with self.clock.phase("update_actor"):
            return self.actor.update(batch, lr, max_probs_diff)

    def update_with_log_probs(
        self, batch: Rollouts, lr: float, max_probs_diff: float | None = None
    ) -> tuple[LogProbs, Metrics]:
        with self.clock.phase("update_actor"):
            return self.actor.update_with_log_probs(batch, lr, max_probs_diff)


class TimedCritic(Critic):
    """Critic that times values and updates."""

    def __init__(self, critic: Critic, clock: Clock) -> None:
        self.wrapped = critic
        self.clock = clock

    def compute_values(self, batch: Rollouts) -> Ragged:
        with self.clock.phase("values"):
            return self.wrapped.compute_values(batch)

    def update(self, batch: Rollouts, lr: float) -> Metrics:
        with self.clock.phase("update_critic"):
            return self.wrapped.update(batch, lr)

    def save(self, folder: Path) -> None:
        self.wrapped.save(folder)

    def state_bytes(self) -> int:
        return self.wrapped.state_bytes()

    def load(self, folder: Path) -> None:
        self.wrapped.load(folder)

    def pop_oom_retries(self) -> list[OomRetry]:
        return self.wrapped.pop_oom_retries()


class TimedReference(Reference):
    """Reference that times log-probs."""

    def __init__(self, reference: Reference, clock: Clock) -> None:
        self.wrapped = reference
        self.clock = clock

    def compute_log_probs(self, batch: Rollouts, top_k: int = 0) -> LogProbs:
        with self.clock.phase("ref"):
            return self.wrapped.compute_log_probs(batch, top_k)

    def pop_oom_retries(self) -> list[OomRetry]:
        return self.wrapped.pop_oom_retries()


class TimedReward(Reward):
    """Reward that times scoring."""

    def __init__(self, reward: Reward, clock: Clock) -> None:
        self.wrapped = reward
        self.clock = clock

    def compute_scores(self, rollouts: Rollouts, validate: bool = False) -> Scores:
        with self.clock.phase("reward"):
            return self.wrapped.compute_scores(rollouts, validate)


class TimedRewardModel(RewardModel):
    """Reward model that times scores."""

    def __init__(self, model: RewardModel, clock: Clock) -> None:
        self.wrapped = model
        self.clock = clock

    def compute_rewards(self, batch: Rollouts) -> Ragged:
        with self.clock.phase("rm_scores"):
            return self.wrapped.compute_rewards(batch)

    def pop_oom_retries(self) -> list[OomRetry]:
        return self.wrapped.pop_oom_retries()


class TimedRewardLearner(TimedRewardModel, RewardLearner):
    """Reward model that times scores and updates."""

    def __init__(self, learner: RewardLearner, clock: Clock) -> None:
        super().__init__(learner, clock)
        self.learner = learner

    def update(self, batch: Rollouts, lr: float) -> Metrics:
        with self.clock.phase("update_rm"):
            return self.learner.update(batch, lr)

    def set_scale(self, mean: float, std: float) -> None:
        self.learner.set_scale(mean, std)

    def save(self, folder: Path) -> None:
        self.learner.save(folder)

    def state_bytes(self) -> int:
        return self.learner.state_bytes()

    def load(self, folder: Path) -> None:
        self.learner.load(folder)

    def export(self, folder: Path) -> None:
        self.learner.export(folder)
