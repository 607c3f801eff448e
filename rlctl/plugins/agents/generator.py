"""Generator whose responses are episodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from itertools import chain, compress
from typing import TYPE_CHECKING, Self

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.agent_columns import SINGLE_TURN
from rlctl.data_prep.rows import PromptRow
from rlctl.episodes import Episode
from rlctl.errors import RlctlError
from rlctl.plugins.agents.environments.protocol import Row
from rlctl.plugins.agents.episode import EpisodeRun, EpisodeSettings, EpisodeTask
from rlctl.plugins.agents.episode_setup import check_episodes, episode_settings
from rlctl.plugins.agents.programs.program_run import ProgramRun
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Prompts, Ragged, Rollouts
from rlctl.runtime.base.clock import timed
from rlctl.runtime.base.ops import first_rows
from rlctl.runtime.generation.on_engines import OnEngines
from rlctl.runtime.generation.policy_engines import Engines
from rlctl.runtime.generation.schedule import OnStates, Schedule
from rlctl.runtime.generators import Generation
from rlctl.runtime.model.routing import RoutingShape
from rlctl.runtime.rewards.reward_report import exceeds
from rlctl.runtime.rewards.role import EarlyScoring, RuleReward
from rlctl.runtime.rollout.requests import Decoding

if TYPE_CHECKING:
    from rlctl.runtime.serving.endpoint import Endpoint


LOG = logging.getLogger(__name__)

_NO_OVERLAP = (
    "responses are scored after generation, although reward.overlap is true: an episode of an "
    "agent program may have several rows"
)


class EpisodeGenerator(OnEngines):
    """Generator of an episode for each response."""

    def __init__(
        self,
        engines: Engines,
        settings: EpisodeSettings,
        on_states: OnStates,
        reward: RuleReward | None = None,
    ) -> None:
        """Build the generator; `reward` gets each episode when it ends."""
        super().__init__(engines)
        self.settings = settings
        self.on_states = on_states
        # A program's episode may become several rows.
        self.reward = reward if settings.kept_roles is None else None
        self.busy_s = 0.0  # in which the engines had work

    @classmethod
    def check(
        cls, config: schema.Config, tokenizer: PreTrainedTokenizerBase, rows: Sequence[PromptRow]
    ) -> None:
        """Play the beginning of the first episode: see `check_episodes`."""
        default = config.actor_rollout_ref.rollout.agent.default_agent_loop
        for row in rows:
            if (row.agent_name or default) != SINGLE_TURN:
                check_episodes(config, tokenizer, row)
                break

    @classmethod
    @contextmanager
    def open(cls, generation: Generation) -> Iterator[Self]:
        """Yield the generator; the processes of its environments end with the block."""
        reward = generation.early_reward
        agent = generation.config.actor_rollout_ref.rollout.agent
        if reward is not None and agent.program is not None:
            LOG.info(_NO_OVERLAP)
            reward = None
        settings = episode_settings(
            generation.config,
            generation.tokenizer,
            generation.sampling,
            generation.rank_info,
            generation.logs,
        )
        try:
            yield cls(generation.engines, settings, generation.on_states, reward)
        finally:
            settings.environments.close()

    @timed("gen")
    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        """Return n episodes for each of B prompts: see `Generator`.

        Failed episodes are among them. Raises RlctlError if their share exceeds the limit.
        """
        schedule = Schedule(
            self.engines,
            fixed=self.settings.fixed,
            num_threads=self.settings.num_threads,
            on_states=self.on_states,
        )
        try:
            played = self.play(prompts, seed, validate, greedy, schedule)
            rollouts = asyncio.run(schedule.run(played))
        finally:
            self.engines.end_exchange()
            self.on_states({})
        self.busy_s += schedule.busy_s
        self.check_failures(rollouts)
        return rollouts

    async def play(
        self, prompts: Prompts, seed: int, validate: bool, greedy: bool, schedule: Schedule
    ) -> Rollouts:
        """Return n episodes for each of B prompts, which may share the engines: see `Player`."""
        settings = self.settings
        params = settings.sampling.params(prompts.group, seed, validate, greedy, prompts.images)
        rows = prompts.repeat(params.n)
        endpoint: Endpoint | None = None
        if settings.kept_roles is not None:
            from rlctl.runtime.serving.endpoint import Endpoint

            endpoint = Endpoint()
        first = int(prompts.group[0]) * params.n
        tasks = self._tasks(rows, first, params.decoding(), params.row_seeds(len(rows)).tolist())

        def begin(task: EpisodeTask) -> EpisodeRun:
            if endpoint is None or task.row["agent_name"] == SINGLE_TURN:
                return EpisodeRun(settings, task, schedule)
            return ProgramRun(endpoint, settings, task, schedule)

        runs = [begin(task) for task in tasks]
        scoring = None if self.reward is None else self.reward.begin(rows)
        play = partial(_play, runs=runs, begin=begin, scoring=scoring)
        try:
            async with endpoint or nullcontext():
                episodes = await schedule.gather(map(play, range(len(rows))))
        finally:
            schedule.states.subtract(run.state for run in runs)
        # Without learning an episode has one row: the last that its program started.
        shape = settings.sampling.routing
        all_samples = not (validate or greedy)
        rollouts = _rollouts(rows, runs, episodes, shape, all_samples)
        if scoring is not None:
            scoring.finish(rollouts)
        return rollouts

    def _tasks(
        self, rows: Prompts, first: int, decoding: Decoding, seeds: list[int]
    ) -> list[EpisodeTask]:
        """Return the starts of the episodes of `rows`, which are numbered from `first`."""
        all_images = rows.images or [()] * len(rows)
        starts = zip(rows.rows, rows.prompt_ids.rows(), seeds, all_images, strict=True)
        default = self.settings.default_agent
        return [
            EpisodeTask(_row(row, default), number, ids.tolist(), decoding, seed, images)
            for number, (row, ids, seed, images) in enumerate(starts, first)
        ]

    def check_failures(self, rollouts: Rollouts) -> None:
        """Raise RlctlError if too many episodes of a batch failed."""
        once = first_rows(rollouts.episode_of_row)
        episodes = list(compress(rollouts.episodes, once))
        failed = [episode for episode in episodes if episode.failed]
        share = self.settings.max_failed_share
        if exceeds(len(failed), len(episodes), share):
            raise RlctlError(
                f"{len(failed)} of {len(episodes)} episodes failed; the first: "
                f"{failed[0].outcome}: {failed[0].error}",
                where=f"actor_rollout_ref.rollout.agent.max_failed_share={share:g}",
                hint="`rlctl env test` runs an environment alone; agent.max_failed_share and "
                "agent.timeouts.* set the limits",
            )


def _row(row: PromptRow, default_agent: str) -> Row:
    """Return a row as environments get it: plain data, with the kind of agent."""
    return {field.name: getattr(row, field.name) for field in fields(row)} | {
        "agent_name": row.agent_name or default_agent
    }


async def _play(
    row: int,
    runs: list[EpisodeRun],
    begin: Callable[[EpisodeTask], EpisodeRun],
    scoring: EarlyScoring | None,
) -> Episode:
    """Play the episode of a row and pass it to `scoring`.

    An episode whose process was killed or stopped from outside is played once more.
    """
    episode = await runs[row].run()
    if runs[row].was_interrupted:
        runs[row].schedule.states[runs[row].state] -= 1
        runs[row] = begin(runs[row].task)
        episode = await runs[row].run()
    if scoring is not None:
        scoring.add(row, torch.tensor(runs[row].tokens.response_ids), episode)
    return episode


def _rollouts(
    prompts: Prompts,
    runs: Sequence[EpisodeRun],
    episodes: Sequence[Episode],
    shape: RoutingShape | None,
    all_samples: bool,
) -> Rollouts:
    """Join the tokens of B episodes into a batch: their rows, or only the last of each.

    `shape` describes the tokens' experts, if they are recorded.
    Rows of an episode share its record, and the group and row of its prompt in the B `prompts`.
    """
    samples = [run.rows if all_samples else run.rows[-1:] for run in runs]
    owner = [i for i, rows in enumerate(samples) for _ in rows]
    tokens = list(chain(*samples))
    prompts = prompts.select(torch.tensor(owner))
    ids = Ragged.from_rows([row.response_ids for row in tokens], torch.int64)
    rewards = torch.zeros(len(ids.values))
    starts = ids.offsets.tolist()
    for start, row in zip(starts, tokens, strict=False):
        for position, reward in row.rewards.items():
            rewards[start + position] = reward
    return Rollouts(
        prompt_ids=Ragged.from_rows([row.prompt_ids for row in tokens], torch.int64),
        group=prompts.group,
        rows=prompts.rows,
        response_ids=ids,
        response_mask=Ragged.from_rows([row.mask for row in tokens], torch.float32),
        rollout_log_probs=Ragged.from_rows([row.log_probs for row in tokens], torch.float32),
        finish=[row.finish for row in tokens],
        turn=Ragged.from_rows([row.turn for row in tokens], torch.int64),
        versions=Ragged.from_rows([row.versions for row in tokens], torch.int64),
        step_rewards=ids.like(rewards),
        routing=Ragged.from_rows([row.whole_routing(shape) for row in tokens]) if shape else None,
        episodes=[episodes[i] for i in owner],
        images=[row.images for row in tokens],
    )
