"""The schema of the configuration: type, bounds and one line of help for each key. Defaults have their one home in library/*.yaml."""

from __future__ import annotations

from rlctl.recipes.schema.algorithm import (
    Algorithm,
    FilterGroups,
    KLControl,
    OverlongBuffer,
    RolloutCorrection,
)
from rlctl.recipes.schema.critic import Critic
from rlctl.recipes.schema.data import Data
from rlctl.recipes.schema.fields import Section
from rlctl.recipes.schema.policy import (
    FSDP,
    Actor,
    ActorRolloutRef,
    FrozenFSDP,
    Model,
    MultiTurn,
    Optim,
    PolicyLoss,
    Ref,
    Rollout,
    ValKwargs,
)
from rlctl.recipes.schema.reward import CustomRewardFunction, Reward, RewardModel
from rlctl.recipes.schema.sweep import Sweep
from rlctl.recipes.schema.trainer import (
    Alarms,
    KeepBest,
    Mismatch,
    Placement,
    RayInit,
    RayKwargs,
    Timeouts,
    Tracking,
    Trainer,
)

__all__ = [
    "FSDP", "Actor", "ActorRolloutRef", "Alarms", "Algorithm", "Config", "Critic", "CustomRewardFunction", "Data", "FilterGroups",
    "FrozenFSDP", "KLControl", "KeepBest", "Mismatch", "Model", "MultiTurn", "Optim", "OverlongBuffer", "Placement", "PolicyLoss",
    "RayInit", "RayKwargs", "Ref", "Reward", "RewardModel", "Rollout", "RolloutCorrection", "Section", "Sweep", "Timeouts",
    "Tracking", "Trainer", "ValKwargs",
]  # fmt: skip


class Config(Section):
    """The whole configuration of a run, judged. Sections are handed to those who use them; nobody passes the whole."""

    data: Data
    actor_rollout_ref: ActorRolloutRef
    critic: Critic
    reward: Reward
    algorithm: Algorithm
    trainer: Trainer
    ray_kwargs: RayKwargs
    sweep: Sweep
