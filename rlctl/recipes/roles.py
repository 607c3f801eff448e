"""Table of the model roles of a run: plain data, read by build, planning, checkpoints and the CLI.

The rule-based reward is not in it: it holds no model and runs on the controller.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag
from operator import attrgetter
from typing import Any, Literal

from rlctl.recipes.schema import FSDP, Actor, Config, Critic, Model, Placement


@dataclass(frozen=True)
class Role:
    """A role that holds a model. All sections are dotted config paths."""

    name: str  # in checkpoints, logs, metrics and worker processes
    pool_key: str  # field of `trainer.placement`
    model_key: str  # section that describes the model
    section: str  # section with the role's own settings
    kind: Literal["policy", "backbone"]  # a causal LM, or its trunk with a value head
    worker: str  # class that implements the role on one rank, as "module:Class"
    model_of: str | None = None  # the model with all its settings; None: `model_key`
    fsdp_key: str | None = None  # section of the sharding settings; None: not sharded
    needed_for: str | None = None  # the `Needs` flag that asks for the role; None: always built
    learns: bool = False  # has an optimizer and a state in checkpoints
    passes: Literal["ppo", "log_prob"] | None = None  # prefix of its micro-batch keys
    dynamic_bsz_key: str | None = None  # key that selects micro-batches by token budget
    own_pool_only: bool = False  # built only where its pool is not the actor's
    adapter_base: bool = False  # served by the actor's base model where that has LoRA adapters

    def pool(self, placement: Placement) -> str | None:
        """Return the pool in which the role is placed; None where it has none."""
        return attrgetter(self.pool_key)(placement)

    def model(self, config: Config) -> Model:
        """Return the section that describes the role's model."""
        return _lookup(config, self.model_of or self.model_key)

    def fsdp(self, config: Config) -> FSDP | None:
        """Return the role's sharding settings; None where its model is not sharded."""
        return None if self.fsdp_key is None else _lookup(config, self.fsdp_key)

    def learner(self, config: Config) -> Actor | Critic:
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
        return _lookup(config, f"{self.section}.{self.passes}_micro_batch_size_per_gpu")


ACTOR = Role(
    name="actor",
    pool_key="actor",
    model_key="actor_rollout_ref.model",
    section="actor_rollout_ref.actor",
    kind="policy",
    worker="rlctl.runtime.workers.actor:ActorWorker",
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
    worker="rlctl.runtime.workers.rollout:RolloutWorker",
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
    worker="rlctl.runtime.workers.reference:ReferenceWorker",
    fsdp_key="actor_rollout_ref.ref.fsdp_config",
    needed_for="REFERENCE",
    passes="log_prob",
    dynamic_bsz_key="actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
    adapter_base=True,
)
CRITIC = Role(
    name="critic",
    pool_key="critic",
    model_key="critic.model",
    section="critic",
    kind="backbone",
    worker="rlctl.runtime.workers.critic:CriticWorker",
    fsdp_key="critic.fsdp_config",
    needed_for="CRITIC",
    learns=True,
    passes="ppo",
    dynamic_bsz_key="critic.use_dynamic_bsz",
)

ROLES = (ACTOR, ROLLOUT, REFERENCE, CRITIC)


def needed_roles(placement: Placement, needs: Flag) -> list[Role]:
    """Return the roles that an algorithm with these `Needs` flags uses, the actor first."""
    flags = {None, *(flag.name for flag in needs)}
    return [
        role
        for role in ROLES
        if role.needed_for in flags and (not role.own_pool_only or _has_own_pool(role, placement))
    ]


def built_roles(config: Config, needs: Flag) -> list[Role]:
    """Return the needed roles that load a model of their own."""
    roles = needed_roles(config.trainer.placement, needs)
    return [role for role in roles if not is_adapter_base(role, config)]


def is_adapter_base(role: Role, config: Config) -> bool:
    """Return whether the actor without its adapters serves `role`, so that no model is loaded."""
    placement = config.trainer.placement
    shared = role.pool(placement) == ACTOR.pool(placement)
    actor = ACTOR.model(config)
    is_base = shared and role.adapter_base and role.model(config).path == actor.path
    return is_base and actor.lora_rank > 0


def pool_names(placement: Placement, needs: Flag) -> list[str]:
    """Return the pools of the needed roles, the actor's first."""
    pools = [role.pool(placement) for role in needed_roles(placement, needs)]
    return list(dict.fromkeys(pool for pool in pools if pool is not None))


def rollout_pool(placement: Placement, needs: Flag) -> str | None:
    """Return the pool of the rollout engines; None where they run in the actor's processes."""
    return ROLLOUT.pool(placement) if ROLLOUT in needed_roles(placement, needs) else None


def engine_role(placement: Placement, needs: Flag) -> Role | None:
    """Return the role whose processes hold the rollout engines; None where none are needed."""
    if ROLLOUT in needed_roles(placement, needs):
        return ROLLOUT
    flags = {flag.name for flag in needs}
    return ACTOR if ROLLOUT.needed_for in flags else None


def _has_own_pool(role: Role, placement: Placement) -> bool:
    return role.pool(placement) not in (None, ACTOR.pool(placement))


def _lookup(config: Config, key: str) -> Any:
    return attrgetter(key)(config)
