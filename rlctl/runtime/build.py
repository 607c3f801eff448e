"""From a configuration to roles: which workers are built, of what, and in which pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from transformers import PreTrainedTokenizerBase

from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.recipes.roles import REFERENCE, is_adapter_base, rollout_pool
from rlctl.runtime.algorithms.base import Algorithm, Needs, ValueLoss
from rlctl.runtime.batch import LogProbs, Rollouts
from rlctl.runtime.budget import OomRetry
from rlctl.runtime.cluster.disaggregated import DisaggregatedActor
from rlctl.runtime.cluster.inline import Pool
from rlctl.runtime.data.tokenizer import stop_token_ids
from rlctl.runtime.rewards.pool import RewardPool
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.rewards.specs import reward_specs
from rlctl.runtime.roles import Actor, Critic, Reference, Reward, Roles
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.workers.actor import ActorSpec, ActorWorker
from rlctl.runtime.workers.critic import CriticSpec, CriticWorker
from rlctl.runtime.workers.reference import ReferenceSpec, ReferenceWorker
from rlctl.runtime.workers.rollout import RolloutSpec, RolloutWorker

if TYPE_CHECKING:
    from rlctl.runtime.cluster.engine_group import EngineGroup


def load_algorithm(config: schema.Config, num_steps: int) -> Algorithm:
    """The algorithm `algorithm.name`, judged against the rest of the configuration."""
    return load("algorithms", config.algorithm.name).from_config(config, num_steps)


def build_reward(
    config: schema.Config,
    tokenizer: PreTrainedTokenizerBase,
    num_processes: int,
    logs: Path | None = None,
) -> tuple[RuleReward, Callable[[], None]]:
    """The reward role on the controller, and what closes it; what its functions print goes to files in `logs`, or to stderr.

    Raises `ConfigError` for a function that cannot be used.
    """
    number = config.reward.num_processes or num_processes
    pool = RewardPool(
        reward_specs(config.reward),
        timeout_s=config.reward.timeout_s,
        num_processes=number,
        logs=logs,
    )
    return RuleReward(tokenizer, pool), pool.close


def build_roles(
    config: schema.Config,
    algorithm: Algorithm,
    tokenizer: PreTrainedTokenizerBase,
    pools: Mapping[str, Pool],
    reward: Reward,
    on_phase: Callable[[str], None],
) -> Roles:
    """Build the workers that `algorithm` needs, each in its pool. `on_phase` is told what is being built."""
    placement, needs = config.trainer.placement, algorithm.needs
    separate = rollout_pool(placement, needs)
    engines: EngineGroup | None = None
    if separate is not None:  # they start while everything else is built
        engines = cast(
            "EngineGroup",
            pools[separate].spawn("rollout", RolloutWorker, _rollout_spec(config, tokenizer)),
        )
    on_phase("building the actor")
    actor = build_actor(config, algorithm, tokenizer, pools[placement.actor])
    if Needs.ENGINE in needs and engines is None:
        on_phase(f"starting the rollout engine ({config.actor_rollout_ref.rollout.name})")
        while (phase := actor.continue_startup()) is not None:
            on_phase(phase)
    reference: Reference | None = None
    if Needs.REFERENCE in needs:
        if is_adapter_base(REFERENCE, config):
            reference = BaseOfActor(actor)
        else:
            on_phase("building the reference")
            reference = pools[placement.reference].spawn(
                "reference", ReferenceWorker, _reference_spec(config)
            )
    critic: Critic | None = None
    if Needs.CRITIC in needs:
        on_phase("building the critic")
        critic = pools[placement.critic].spawn(
            "critic", CriticWorker, _critic_spec(config, algorithm)
        )
    if engines is not None:
        on_phase("building the rollout engines")
        engines.wait()
        engines.send_weights = actor.send_weights
        actor = DisaggregatedActor(actor, engines)
    return Roles(actor=actor, reward=reward, critic_role=critic, reference_role=reference)


@dataclass(frozen=True)
class BaseOfActor:
    """Implements `Reference` by the actor's frozen base."""

    actor: Actor

    def compute_log_probs(self, batch: Rollouts) -> LogProbs:
        return self.actor.compute_base_log_probs(batch)

    def pop_oom_retries(self) -> list[OomRetry]:
        """None: the actor tells of its own."""
        return []


def build_actor(
    config: schema.Config, algorithm: Algorithm, tokenizer: PreTrainedTokenizerBase, pool: Pool
) -> ActorWorker:
    """The actor alone, its engine not started."""
    actor_rollout = config.actor_rollout_ref
    spec = ActorSpec(
        model=actor_rollout.model,
        actor=actor_rollout.actor,
        sampling=_sampling(config, tokenizer),
        max_prompt_length=config.data.max_prompt_length,
        algorithm=algorithm,
        seed=config.trainer.seed,
    )
    return pool.spawn("actor", ActorWorker, spec)


def _sampling(config: schema.Config, tokenizer: PreTrainedTokenizerBase) -> SamplingConfig:
    actor_rollout = config.actor_rollout_ref
    return SamplingConfig(
        actor_rollout.rollout,
        config.data.max_response_length,
        stop_token_ids(tokenizer, actor_rollout.model.path),
    )


def _rollout_spec(config: schema.Config, tokenizer: PreTrainedTokenizerBase) -> RolloutSpec:
    model = config.actor_rollout_ref.model
    return RolloutSpec(
        model, _sampling(config, tokenizer), config.data.max_prompt_length, config.trainer.seed
    )


def _reference_spec(config: schema.Config) -> ReferenceSpec:
    actor_rollout = config.actor_rollout_ref
    return ReferenceSpec(
        model=actor_rollout.model,
        ref=actor_rollout.ref,
        use_dynamic_bsz=actor_rollout.actor.use_dynamic_bsz,
        temperature=actor_rollout.rollout.temperature,
        seed=config.trainer.seed,
    )


def _critic_spec(config: schema.Config, algorithm: Algorithm) -> CriticSpec:
    return CriticSpec(
        critic=config.critic, algorithm=cast(ValueLoss, algorithm), seed=config.trainer.seed
    )
