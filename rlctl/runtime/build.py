"""Construction of algorithm, reward and roles from a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from transformers import PreTrainedTokenizerBase

from rlctl.cores import available_cores
from rlctl.plugins import load, parse_params
from rlctl.plugins.result_check import check_result
from rlctl.recipes import schema
from rlctl.recipes.role_table import (
    ACTOR,
    CRITIC,
    JUDGE,
    REFERENCE,
    REWARD_LEARNER,
    REWARD_MODEL,
    Role,
    engine_role,
    is_adapter_base,
    needed_roles,
)
from rlctl.runtime.algorithms.base import Algorithm, Needs, RoutesRows, ValueLoss
from rlctl.runtime.base.roles import Actor, Critic, Reference, Reward, RewardModel, Roles
from rlctl.runtime.cluster.pools import Pool, Pools, W
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.rewards.reward_pool import RewardPool
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.workers.actor import ActorSpec, ActorWorker
from rlctl.runtime.workers.critic import CriticSpec, CriticWorker
from rlctl.runtime.workers.reference import ReferenceSpec, ReferenceWorker

if TYPE_CHECKING:
    from rlctl.runtime.cluster.engine_group import EngineGroup
    from rlctl.runtime.data.loader import PromptSet
    from rlctl.runtime.generation.policy_engines import Engines
    from rlctl.runtime.workers.rollout import RolloutSpec

LOG = logging.getLogger(__name__)


def load_algorithm(config: schema.Config, num_steps: int) -> Algorithm:
    """Return the algorithm `algorithm.name`; it raises `ConfigError` where settings conflict.

    An algorithm with settings gets them as the argument `params` of `from_config`.
    """
    name = config.algorithm.name
    found = load("algorithms", name)
    params = parse_params(found, name, config.algorithm.params, "algorithm.params")
    more = {} if params is None else {"params": params}
    built = found.from_config(config, num_steps, **more)
    is_right = isinstance(getattr(built, "needs", None), Needs)
    check_result(found.from_config, is_right, built, "an algorithm whose `needs` are Needs")
    return built


class RolePlugin(Protocol):
    """Role beside those of the PPO family: a class of the kind `roles`, with the role's name."""

    def check(self, config: schema.Config) -> None:
        """Raise ConfigError for settings that do not fit the role's model."""
        ...

    def build(self, config: schema.Config, pool: Pool, algorithm: Algorithm | None = None) -> Any:
        """Build the role in the processes of `pool`; one that learns gets the run's algorithm."""
        ...

    def score(
        self,
        config: schema.Config,
        tokenizer: PreTrainedTokenizerBase,
        reward: Reward,
        built: RewardModel,
    ) -> Reward:
        """Return the run's reward, of the role that was built and the functions (`reward`)."""
        ...

    def validator(self, config: schema.Config, prompts: PromptSet) -> Any:
        """Return the validation of the role, a `ModelValidation` of `training/validation.py`."""
        ...


def role_plugin(name: str) -> RolePlugin:
    """Return the plug-in that builds a role. Raises ConfigError if it is not installed."""
    return load("roles", name)()


@contextmanager
def build_reward(
    config: schema.Config,
    tokenizer: PreTrainedTokenizerBase,
    sources: Iterable[str],
    logs: Path | None = None,
    run: Path | None = None,
    judge: Pool | None = None,
) -> Iterator[RuleReward]:
    """Yield the reward role, which runs on the controller; its processes end with the block.

    `sources` are the data sources of the rows. What the reward functions print goes to files in
    `logs`, or to stderr. The folder `run` has the cache of replies, the pool `judge` the engines of
    the run's judge. Raises `ConfigError` for a function that cannot be loaded.
    """
    requests = request_settings(config, run, judge)
    with RewardPool.from_config(config.reward, sources, available_cores(), logs, requests) as pool:
        limits = config.reward.max_failed_share, config.reward.max_failed_steps
        yield RuleReward(tokenizer, pool, *limits)


def request_settings(
    config: schema.Config, run: Path | None, judge: Pool | None
) -> RequestSettings:
    """Return the settings of reward requests; start the engines of the run's judge, if any."""
    settings = RequestSettings.from_config(config.reward, run)
    path = config.reward.judge.model.path
    if path is None or judge is None:
        return settings
    urls, key = role_plugin(JUDGE).build(config, judge)
    return replace(settings, engines=tuple(urls), engine_key=key, engine_name=path)


def build_roles(
    config: schema.Config,
    algorithm: Algorithm,
    tokenizer: PreTrainedTokenizerBase,
    pools: Pools,
    reward: Reward,
    on_phase: Callable[[str], None],
) -> tuple[Roles, Engines | None]:
    """Build the roles that `algorithm` needs, each in its pool; return them and the engines.

    Calls `on_phase` with a description of each part before it is built.
    """
    placement = config.trainer.placement
    needs = algorithm.needs
    needed = needed_roles(config, needs)
    engine_host = engine_role(config, needs)
    if REWARD_LEARNER in needed:
        on_phase("building the reward model")
        pool = _pool(REWARD_LEARNER, placement, pools)
        learner = role_plugin(REWARD_LEARNER.name).build(config, pool, algorithm)
        return Roles(None, reward, reward_learner_role=learner), None
    engines: EngineGroup | None = None
    if pools.engines is not None:  # engines start while the other roles are built
        engines = pools.engines.spawn(_rollout_spec(config, tokenizer))
    on_phase("building the actor")
    actor = build_actor(config, algorithm, tokenizer, pools.workers[placement.actor])
    hosted: Engines | None = None
    if engine_host is ACTOR:
        hosted = colocated_engines(config, actor)
        on_phase(f"starting the rollout engine ({config.actor_rollout_ref.rollout.name})")
        while (phase := actor.continue_startup()) is not None:
            on_phase(phase)
    reference: Reference | None = None
    if Needs.AVERAGE in needs:
        from rlctl.runtime.algorithms.references import ActorAsReference

        reference = ActorAsReference(actor, "average")
    elif REFERENCE in needed:
        reference = _build_reference(config, algorithm, actor, pools, on_phase)
    critic: Critic | None = None
    if CRITIC in needed:
        on_phase("building the critic")
        valued = critic_spec(config, algorithm)
        critic = _spawn(CRITIC, CriticWorker, placement, pools, valued)
    scorer: RewardModel | None = None
    if REWARD_MODEL in needed:
        on_phase("building the reward model")
        plugin = role_plugin(REWARD_MODEL.name)
        built = plugin.build(config, _pool(REWARD_MODEL, placement, pools))
        reward = plugin.score(config, tokenizer, reward, built)
        scorer = built
    if engines is not None:
        on_phase("building the rollout engines")
        hosted = _separate_engines(actor, engines, config.async_training, needs)
    return Roles(actor, reward, critic, reference, scorer, generator_role=hosted), hosted


def colocated_engines(config: schema.Config, actor: ActorWorker) -> Engines:
    """Return the engines in the processes of `actor`, of which each starts one."""
    from rlctl.runtime.generation.policy_engines import ColocatedEngines

    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return ColocatedEngines(actor, actor.world_size, size)


def _separate_engines(
    trainer: ActorWorker, engines: EngineGroup, schedule: schema.AsyncTraining, needs: Needs
) -> Engines:
    """Return the `engines` that have separate processes, once they are ready."""
    from rlctl.runtime.generation.separate_engines import SeparateEngines

    engines.wait()
    ahead = schedule.max_staleness > 0 and Needs.GROUPS in needs
    in_flight = ahead and schedule.eager
    return SeparateEngines(trainer, engines, ahead=ahead, in_flight=in_flight)


def critic_spec(config: schema.Config, algorithm: Algorithm) -> CriticSpec:
    """Return the settings of the critic."""
    return CriticSpec(
        critic=config.critic,
        algorithm=cast(ValueLoss, algorithm),
        seed=config.trainer.seed,
        compiled=config.actor_rollout_ref.actor.use_torch_compile,
    )


def _build_reference(
    config: schema.Config,
    algorithm: Algorithm,
    actor: Actor,
    pools: Pools,
    on_phase: Callable[[str], None],
) -> Reference:
    """Build the reference, or those between which the algorithm chooses for each row."""
    placement = config.trainer.placement
    if isinstance(algorithm, RoutesRows) and algorithm.references:
        from rlctl.runtime.algorithms.references import RoutedReference

        members: dict[str, Reference] = {}
        for name, model in algorithm.references.items():
            on_phase(f"building the teacher {name}")
            role = replace(REFERENCE, name=f"{REFERENCE.name}_{name}")
            spec = ReferenceSpec.from_config(config, algorithm.needs, model)
            members[name] = _spawn(role, ReferenceWorker, placement, pools, spec)
        return RoutedReference(members, algorithm.reference_of)
    if is_adapter_base(REFERENCE, config):
        from rlctl.runtime.algorithms.references import ActorAsReference

        return ActorAsReference(actor, "base")
    on_phase("building the reference")
    spec = ReferenceSpec.from_config(config, algorithm.needs, REFERENCE.model(config))
    return _spawn(REFERENCE, ReferenceWorker, placement, pools, spec)


def _pool(role: Role, placement: schema.Placement, pools: Pools) -> Pool:
    """Return the pool of a role that has one."""
    pool = role.pool(placement)
    assert pool is not None, f"role {role.name} has no pool"
    return pools.workers[pool]


def _spawn(
    role: Role, worker: type[W], placement: schema.Placement, pools: Pools, spec: object
) -> W:
    """Build the worker of `role` in the processes of its pool."""
    return _pool(role, placement, pools).spawn(role.name, worker, spec)


def build_actor(
    config: schema.Config, algorithm: Algorithm, tokenizer: PreTrainedTokenizerBase, pool: Pool
) -> ActorWorker:
    """Build the actor without starting its rollout engine."""
    actor_rollout = config.actor_rollout_ref
    spec = ActorSpec(
        model=actor_rollout.model,
        actor=actor_rollout.actor,
        sampling=SamplingConfig.from_config(config, tokenizer),
        max_prompt_length=config.data.max_prompt_length,
        algorithm=algorithm,
        seed=config.trainer.seed,
    )
    return pool.spawn(ACTOR.name, ActorWorker, spec)


def _rollout_spec(config: schema.Config, tokenizer: PreTrainedTokenizerBase) -> RolloutSpec:
    from rlctl.runtime.workers.rollout import RolloutSpec

    model = config.actor_rollout_ref.model
    return RolloutSpec(
        model,
        SamplingConfig.from_config(config, tokenizer),
        config.data.max_prompt_length,
        config.trainer.seed,
    )
