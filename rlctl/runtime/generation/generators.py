"""Ways in which the actor of a run generates: single responses, episodes, or a stream of both."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from rlctl.recipes import schema
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.roles import Roles
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.workers.actor import ActorWorker

if TYPE_CHECKING:
    from rlctl.runtime.agents.schedule import OnStates, TurnEngines
    from rlctl.runtime.agents.stream import Player, Stream

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """Configured generation of an actor with `num_ranks` ranks; `rank_info` is that of one.

    Environments write to files in `logs`. `on_states` gets the number of episodes by state.
    `reward`, if it runs in processes, gets responses and episodes as soon as they are finished.
    """

    config: schema.Config
    tokenizer: PreTrainedTokenizerBase
    num_ranks: int
    rank_info: RankInfo
    logs: Path | None = None
    on_states: OnStates = lambda _: None
    reward: RuleReward | None = None


@contextmanager
def with_episodes(generation: Generation, roles: Roles) -> Iterator[Roles]:
    """Let the actor of `roles` generate episodes if the configuration has several turns.

    Yields the roles; at the end the environments are closed.
    """
    config, tokenizer, reward = generation.config, generation.tokenizer, generation.reward
    if roles.actor_role is None:
        yield roles
        return
    overlaps = config.reward.overlap and not config.async_training.eager  # it has its own way
    early = reward if reward is not None and overlaps and reward.pool.has_workers else None
    if early is None and not config.actor_rollout_ref.rollout.multi_turn.enable:
        yield roles
        return
    from rlctl.runtime.agents.actor import AgentActor, ColocatedEngines
    from rlctl.runtime.agents.build import episode_settings
    from rlctl.runtime.agents.stream import NO_OVERLAP
    from rlctl.runtime.cluster.disaggregated import DisaggregatedActor

    actor, sampling = roles.actor, SamplingConfig.from_config(config, tokenizer)
    if isinstance(actor, DisaggregatedActor):
        engines: TurnEngines = actor
    else:
        assert isinstance(actor, ActorWorker), "the actor of `build_roles` or `build_actor`"
        size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        engines = ColocatedEngines(actor, generation.num_ranks, size)
    if not config.actor_rollout_ref.rollout.multi_turn.enable:
        assert early is not None
        yield _overlapped(config, roles, engines, sampling, early)
        return
    if early is not None and config.actor_rollout_ref.rollout.agent.program is not None:
        LOG.info(NO_OVERLAP, "an episode of an agent program may have several rows")
        early = None
    settings = episode_settings(config, tokenizer, sampling, generation.rank_info, generation.logs)
    try:
        built = AgentActor(actor, engines, settings, generation.on_states, early)
        yield replace(roles, actor_role=built)
    finally:
        settings.environments.close()


@contextmanager
def with_generation(generation: Generation, roles: Roles) -> Iterator[tuple[Roles, Stream | None]]:
    """Let the actor of `roles` generate as configured: see `with_episodes`.

    Yields the roles, and the stream that generates for `async_training.schedule=eager`.
    """
    engines, config = roles.actor_role, generation.config
    with with_episodes(generation, roles) as built:
        if not config.async_training.eager:
            yield built, None
            return
        from rlctl.runtime.agents.actor import AgentActor
        from rlctl.runtime.agents.stream import SingleTurns, Stream, StreamedActor
        from rlctl.runtime.cluster.disaggregated import DisaggregatedActor

        if not isinstance(engines, DisaggregatedActor):
            yield built, None
            return

        actor, num_threads = built.actor, generation.rank_info.num_threads
        if isinstance(actor, AgentActor):
            player: Player = actor
        else:
            length = config.data.max_prompt_length + config.data.max_response_length
            sampling = SamplingConfig.from_config(config, generation.tokenizer)
            player = SingleTurns(sampling, length)
        stream = Stream(engines, player, num_threads, generation.on_states)
        try:
            yield replace(built, actor_role=StreamedActor(actor, stream)), stream
        finally:
            stream.close()


def _overlapped(
    config: schema.Config,
    roles: Roles,
    engines: TurnEngines,
    sampling: SamplingConfig,
    reward: RuleReward,
) -> Roles:
    """Let the actor pass single responses to `reward` as they are finished."""
    from rlctl.runtime.agents.stream import OverlappedActor

    data = config.data
    length = data.max_prompt_length + data.max_response_length
    actor = OverlappedActor(roles.actor, engines, sampling, length, reward)
    return replace(roles, actor_role=actor)
