"""Table of the model roles of a run: plain data, read by build, planning, checkpoints and the CLI.

Reward functions are not in it: they hold no model and run on the controller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Flag
from operator import attrgetter
from typing import Any, Literal

from rlctl.recipes.schema import FSDP, Actor, Config, Critic, Model, Placement, RewardModel


@dataclass(frozen=True)
class Role:
    """A role that holds a model. All sections are dotted config paths."""

    name: str  # in checkpoints, logs, metrics and worker processes
    pool_key: str  # field of `trainer.placement`
    model_key: str  # section that describes the model
    section: str  # section with the role's settings
    # A causal LM, its trunk with a value head, or a sequence classifier with one label, whose head
    # may be new.
    kind: Literal["policy", "backbone", "classifier", "new_classifier"]
    model_of: str | None = None  # the model with all its settings; None: `model_key`
    fsdp_key: str | None = None  # section of the sharding settings; None: not sharded
    needed_for: str | None = None  # the `Needs` flag that asks for the role; None: always built
    enabled_by: str | None = None  # key that must be true; None: none
    replaces: tuple[str, ...] = ()  # roles that are not built in a run that needs this one
    learns: bool = False  # has an optimizer and a state in checkpoints
    passes: Literal["ppo", "log_prob", "forward"] | None = None  # prefix of its token budget
    max_rows_key: str | None = None  # key with the rows of a micro-batch
    dynamic_bsz_key: str | None = None  # key that selects micro-batches by token budget
    own_pool_only: bool = False  # built only where its pool is not the actor's
    is_plugin: bool = False  # built by the plug-in of its name, of the kind `roles`
    adapter_base: bool = False  # served by the actor's base model where that has LoRA adapters
    decided_by: tuple[str, ...] = ()  # keys that decide whether the role is built
    unused_keys: tuple[str, ...] = ()  # patterns of keys without effect if the role is not built

    def pool(self, placement: Placement) -> str | None:
        """Return the pool in which the role is placed; None where it has none."""
        return attrgetter(self.pool_key)(placement)

    def model(self, config: Config) -> Model:
        """Return the section that describes the role's model."""
        return _lookup(config, self.model_of or self.model_key)

    def fsdp(self, config: Config) -> FSDP | None:
        """Return the role's sharding settings; None where its model is not sharded."""
        return None if self.fsdp_key is None else _lookup(config, self.fsdp_key)

    def ranks_per_row(self, config: Config) -> int:
        """Return the number of ranks that compute the same rows."""
        fsdp = self.fsdp(config)
        return 1 if fsdp is None else fsdp.ranks_per_row

    def learner(self, config: Config) -> Actor | Critic | RewardModel:
        """Return the section with the training settings of a role that learns."""
        assert self.learns, f"{self.name} does not learn"
        return _lookup(config, self.section)

    def max_tokens(self, config: Config) -> int:
        """Return the token budget of one micro-batch."""
        return _lookup(config, f"{self.section}.{self.passes}_max_token_len_per_gpu")

    def max_rows(self, config: Config) -> int | None:
        """Return the rows of one micro-batch; None where the token budget decides."""
        if self.dynamic_bsz_key is None or _lookup(config, self.dynamic_bsz_key):
            return None
        key = self.max_rows_key or f"{self.section}.{self.passes}_micro_batch_size_per_gpu"
        return _lookup(config, key)


ACTOR = Role(
    name="actor",
    pool_key="actor",
    model_key="actor_rollout_ref.model",
    section="actor_rollout_ref.actor",
    kind="policy",
    fsdp_key="actor_rollout_ref.actor.fsdp_config",
    learns=True,
    passes="ppo",
    dynamic_bsz_key="actor_rollout_ref.actor.use_dynamic_bsz",
)
ROLLOUT = Role(
    name="rollout",
    pool_key="rollout",
    model_key="actor_rollout_ref.model",
    section="actor_rollout_ref.rollout",
    kind="policy",
    needed_for="ENGINE",
    own_pool_only=True,
)
REFERENCE = Role(
    name="reference",
    pool_key="reference",
    model_key="actor_rollout_ref.ref.model",
    model_of="actor_rollout_ref.reference_model",
    section="actor_rollout_ref.ref",
    kind="policy",
    fsdp_key="actor_rollout_ref.ref.fsdp_config",
    needed_for="REFERENCE",
    passes="log_prob",
    dynamic_bsz_key="actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
    adapter_base=True,
    decided_by=(
        "algorithm.name",
        "algorithm.use_kl_in_reward",
        "actor_rollout_ref.actor.use_kl_loss",
    ),
    unused_keys=("actor_rollout_ref.ref.*", "trainer.placement.reference"),
)
CRITIC = Role(
    name="critic",
    pool_key="critic",
    model_key="critic.model",
    section="critic",
    kind="backbone",
    fsdp_key="critic.fsdp_config",
    needed_for="CRITIC",
    learns=True,
    passes="ppo",
    dynamic_bsz_key="critic.use_dynamic_bsz",
    decided_by=("algorithm.name", "algorithm.adv_estimator"),
    unused_keys=("critic.*", "trainer.placement.critic", "trainer.critic_warmup", "algorithm.lam"),
)

_REWARD_MODEL = "reward.reward_model"
REWARD_MODEL = Role(
    name="reward_model",
    pool_key="reward",
    model_key=f"{_REWARD_MODEL}.model",
    section=_REWARD_MODEL,
    kind="classifier",
    is_plugin=True,
    fsdp_key=f"{_REWARD_MODEL}.fsdp_config",
    enabled_by=f"{_REWARD_MODEL}.enable",
    passes="forward",
    max_rows_key=f"{_REWARD_MODEL}.micro_batch_size_per_gpu",
    dynamic_bsz_key=f"{_REWARD_MODEL}.use_dynamic_bsz",
)
REWARD_LEARNER = replace(
    REWARD_MODEL,
    name="reward_learner",
    needed_for="REWARD_LEARNER",
    enabled_by=None,
    kind="new_classifier",
    replaces=(ACTOR.name, REWARD_MODEL.name),
    learns=True,
    decided_by=("algorithm.name",),
    unused_keys=tuple(
        f"{_REWARD_MODEL}.{key}"
        for key in ("optim.*", "ppo_mini_batch_size", "grad_clip", "model.lora_*")
    ),
)

JUDGE = "judge"  # plug-in of the kind `roles` that serves a judge of the run; no model role

ROLES = (ACTOR, REWARD_LEARNER, ROLLOUT, REFERENCE, CRITIC, REWARD_MODEL)


def needed_roles(config: Config, needs: Flag) -> list[Role]:
    """Return the roles that an algorithm with these `Needs` flags uses, the trained one first."""
    flags = {None, *(flag.name for flag in needs)}
    found = [
        role
        for role in ROLES
        if role.needed_for in flags
        and (role.enabled_by is None or _lookup(config, role.enabled_by))
        and (not role.own_pool_only or _has_own_pool(role, config.trainer.placement))
    ]
    replaced = {name for role in found for name in role.replaces}
    return [role for role in found if role.name not in replaced]


def trained_role(config: Config, needs: Flag) -> Role:
    """Return the role that a run is for: its export is the result. The policy, if there is one."""
    return needed_roles(config, needs)[0]


def built_roles(config: Config, needs: Flag) -> list[Role]:
    """Return the needed roles that load a separate model."""
    return [role for role in needed_roles(config, needs) if not is_adapter_base(role, config)]


def is_adapter_base(role: Role, config: Config) -> bool:
    """Return whether the actor without its adapters serves `role`, so that no model is loaded."""
    placement = config.trainer.placement
    shared = role.pool(placement) == ACTOR.pool(placement)
    actor = ACTOR.model(config)
    is_base = shared and role.adapter_base and role.model(config).path == actor.path
    return is_base and actor.lora_rank > 0


def pool_names(config: Config, needs: Flag) -> list[str]:
    """Return the pools of the needed roles, that of the trained one first."""
    pools = [role.pool(config.trainer.placement) for role in needed_roles(config, needs)]
    return list(dict.fromkeys(pool for pool in pools if pool is not None))


def rollout_pool(config: Config, needs: Flag) -> str | None:
    """Return the pool of the rollout engines; None where they run in the actor's processes."""
    needed = ROLLOUT in needed_roles(config, needs)
    return ROLLOUT.pool(config.trainer.placement) if needed else None


def engine_role(config: Config, needs: Flag) -> Role | None:
    """Return the role whose processes hold the rollout engines; None where none are needed."""
    if ROLLOUT in needed_roles(config, needs):
        return ROLLOUT
    flags = {flag.name for flag in needs}
    return ACTOR if ROLLOUT.needed_for in flags else None


def _has_own_pool(role: Role, placement: Placement) -> bool:
    return role.pool(placement) not in (None, ACTOR.pool(placement))


def _lookup(config: Config, key: str) -> Any:
    return attrgetter(key)(config)
