"""Choice of a run's generator: single responses, episodes, or a stream of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.rows import PromptRow
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Prompts, Rollouts
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.base.roles import Generator, Roles
from rlctl.runtime.generation.policy_engines import Engines
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.rollout.sampling_params import SamplingConfig

if TYPE_CHECKING:
    from rlctl.runtime.generation.schedule import OnStates, Schedule
    from rlctl.runtime.generation.stream import Stream


@dataclass(frozen=True)
class Generation:
    """Configured generation with `engines`; `rank_info` is that of one of their ranks.

    Environments write to files in `logs`. `on_states` gets the number of episodes by state.
    `reward`, if it runs in processes, gets responses and episodes as soon as they are finished.
    """

    config: schema.Config
    tokenizer: PreTrainedTokenizerBase
    engines: Engines
    rank_info: RankInfo
    logs: Path | None = None
    on_states: OnStates = lambda _: None
    reward: RuleReward | None = None

    @property
    def sampling(self) -> SamplingConfig:
        """Return the settings of sampled responses."""
        return SamplingConfig.from_config(self.config, self.tokenizer)

    @property
    def early_reward(self) -> RuleReward | None:
        """The reward, if it gets responses while others are generated."""
        config = self.config
        overlaps = config.reward.overlap and not config.async_training.eager  # it has another way
        return self.reward if overlaps and self.reward and self.reward.pool.has_workers else None


class PlayingGenerator(Generator, Protocol):
    """Generator that also plays for a `Stream`: see `Player`."""

    async def play(
        self, prompts: Prompts, seed: int, validate: bool, greedy: bool, schedule: Schedule
    ) -> Rollouts: ...

    def check_failures(self, rollouts: Rollouts) -> None: ...


class GeneratorKind(Protocol):
    """Plug-in of the group `rlctl.generators`: a class, for instance of the generator itself."""

    @classmethod
    def check(
        cls, config: schema.Config, tokenizer: PreTrainedTokenizerBase, rows: Sequence[PromptRow]
    ) -> None:
        """Try what a run with `rows` would need. Raises ConfigError."""

    @classmethod
    def open(cls, generation: Generation) -> AbstractContextManager[PlayingGenerator]:
        """Yield the generator of a run; its processes end with the block."""
        ...


@contextmanager
def with_generator(
    roles: Roles, generation: Generation | None
) -> Iterator[tuple[Roles, Stream | None]]:
    """Yield the roles with the generator, if there is one: see `open_generator`."""
    if generation is None:
        yield roles, None
        return
    with open_generator(generation) as (generator, stream):
        yield replace(roles, generator_role=generator), stream


@contextmanager
def open_generator(generation: Generation) -> Iterator[tuple[Generator, Stream | None]]:
    """Yield the configured generator, and the stream of `async_training.schedule=eager`."""
    config = generation.config
    engines = generation.engines
    with ExitStack() as stack:
        several: PlayingGenerator | None = None
        turns = config.actor_rollout_ref.rollout.multi_turn
        if turns.enable:
            kind: GeneratorKind = load("generators", turns.generator)
            several = stack.enter_context(kind.open(generation))
        length = config.data.max_prompt_length + config.data.max_response_length
        if config.async_training.eager and engines.are_separate:
            from rlctl.runtime.generation.stream import SingleTurns, Stream, StreamedGenerator

            player = several or SingleTurns(generation.sampling, length)
            threads = generation.rank_info.num_threads
            stream = Stream(engines, player, threads, generation.on_states)
            stack.callback(stream.close)
            yield StreamedGenerator(engines, stream), stream
        elif several is None and (reward := generation.early_reward) is not None:
            from rlctl.runtime.generation.overlap import OverlappedGenerator

            yield OverlappedGenerator(engines, generation.sampling, length, reward), None
        else:
            yield several or engines, None
