"""Schema of the configuration: type, bounds and help of each key. Defaults are in the base YAML."""

from __future__ import annotations

from rlctl.recipes.schema.agents import Agent, AgentTimeouts, MultiTurn
from rlctl.recipes.schema.algorithm import (
    PFPPO,
    Algorithm,
    FilterGroups,
    KLControl,
    OverlongBuffer,
    RolloutCorrection,
)
from rlctl.recipes.schema.data import Data, WeightedFile
from rlctl.recipes.schema.fields import Section
from rlctl.recipes.schema.model import FSDP, Model
from rlctl.recipes.schema.policy import (
    Actor,
    ActorRolloutRef,
    Critic,
    Optim,
    Ref,
    RefModel,
    Rollout,
    Updates,
    ValKwargs,
)
from rlctl.recipes.schema.reward import Reward, RewardModel
from rlctl.recipes.schema.sweep import RayInit, RayKwargs, Sweep
from rlctl.recipes.schema.trainer import (
    AsyncTraining,
    Placement,
    Profile,
    Tracking,
    Trainer,
)

__all__ = [
    "FSDP",
    "PFPPO",
    "Actor",
    "ActorRolloutRef",
    "Agent",
    "AgentTimeouts",
    "Algorithm",
    "AsyncTraining",
    "Config",
    "Critic",
    "Data",
    "FilterGroups",
    "KLControl",
    "Model",
    "MultiTurn",
    "Optim",
    "OverlongBuffer",
    "Placement",
    "Profile",
    "RayInit",
    "Ref",
    "RefModel",
    "Reward",
    "RewardModel",
    "Rollout",
    "RolloutCorrection",
    "Section",
    "Sweep",
    "Tracking",
    "Trainer",
    "Updates",
    "ValKwargs",
    "WeightedFile",
]


class Config(Section):
    """Configuration of a run. Code receives the sections that it uses, not the complete object."""

    data: Data
    actor_rollout_ref: ActorRolloutRef
    critic: Critic
    reward: Reward
    algorithm: Algorithm
    trainer: Trainer
    async_training: AsyncTraining
    ray_kwargs: RayKwargs
    sweep: Sweep

    @property
    def alarm_limits(self) -> dict[str, float | None]:
        """Limits of all alarms by name; an older policy generates other responses on purpose."""
        mismatch = None if self.async_training.max_staleness else self.trainer.mismatch.warn
        return self.trainer.alarms.model_dump() | {"rollout_mismatch": mismatch}
