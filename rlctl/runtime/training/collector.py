"""Collection of the scored responses of a step, with optional dynamic sampling.

A group whose responses all have the same score gives a group estimator no gradient. With
`algorithm.filter_groups`, dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) drops such groups
and generates further batches until `train_batch_size` groups with different scores remain. Surplus
groups are not trained on: their prompts come first in the next step, which generates new responses
with its policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from rlctl.errors import ConfigError, RlctlError
from rlctl.plugins.result_check import check_result
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Algorithm, Needs
from rlctl.runtime.algorithms.stats import spread
from rlctl.runtime.base.batch import Batch, Prompts, Rollouts, Scored
from rlctl.runtime.base.metrics import to_floats
from rlctl.runtime.base.ops import first_rows, group_stats
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.data.loader import PromptLoader
from rlctl.runtime.rewards.role import RuleReward

_SECTION = "algorithm.filter_groups"


@dataclass
class Collector:
    """Source of scored responses.

    `position` is the index of the next prompt in the prompt stream; `waiting` holds the surplus
    prompts that come before it. Only a collector with a filter has surplus prompts. A stateful
    sampler observes the scores of each batch before the next one is drawn.
    """

    loader: PromptLoader
    algorithm: Algorithm
    filter: schema.FilterGroups | None  # None: one batch of prompts per step
    gen_batch_size: int | None = None  # prompts generated at a time with a filter; None: a batch
    drop_failed: bool = False  # leave out responses whose reward call failed
    reward: RuleReward | None = None  # has the first error of calls that failed
    position: int = 0
    waiting: list[int] = field(default_factory=list)

    @classmethod
    def from_config(
        cls,
        loader: PromptLoader,
        algorithm: Algorithm,
        config: schema.Config,
        reward: RuleReward | None = None,
    ) -> Self:
        """Build a collector that filters groups if enabled and if the algorithm needs groups."""
        groups = config.algorithm.filter_groups
        size = config.data.gen_batch_size
        filters = groups if groups.enable and Needs.GROUPS in algorithm.needs else None
        drops = config.reward.failed == "drop"
        return cls(loader, algorithm, filters, size, drop_failed=drops, reward=reward)

    def collect(self, roles: Roles, step: int) -> tuple[Scored, dict[str, float]]:
        """Return the responses that `step` learns from, with group numbers from 0, and metrics.

        Raises `RlctlError` if `max_num_gen_batches` batches do not give enough groups.
        """
        size = self.loader.batch_size
        drawn_size = self._drawn_size
        if self.filter is None:
            drawn = self.loader.draw((step - 1) * size, size)
            self.position = step * size
            return self.collect_drawn(drawn, roles, step)
        kept: list[Scored] = []
        indices: list[int] = []  # prompts of kept groups, as drawn
        seen: list[Prompts] = []
        all_scores: list[Tensor] = []
        played: list[Scored] = []  # with failed episodes, for metrics
        while len(indices) < size:
            if len(all_scores) == self.filter.max_num_gen_batches:
                raise self._too_few(len(indices), step, played)
            drawn = self._next_indices(indices)
            prompts = self.loader.at(drawn)
            seen.append(prompts)
            first = len(all_scores) * drawn_size  # each group of a step has another random stream
            scored = self._responses(replace(prompts, group=prompts.group + first), roles, step)
            played.append(scored)
            scored = _usable(scored, self.drop_failed)
            self._observe(drawn, scored, first)
            all_scores.append(scored.scores[first_rows(scored.episode_of_row)])
            varied = in_varied_group(self._filtered_values(scored), scored.group)
            kept.append(scored.select(varied.nonzero().flatten()))
            numbers = kept[-1].group.unique_consecutive().tolist()
            indices += [drawn[number - first] for number in numbers]
        self.waiting = indices[size:]
        joined = Batch.concat(_with_all_components(kept))
        _, group = joined.group.unique_consecutive(return_inverse=True)
        scores = torch.cat(all_scores)
        return replace(joined, group=group).select((group < size).nonzero().flatten()), {
            "filter_groups/num_gen_batches": float(len(all_scores)),
            "filter_groups/evicted_groups": float(drawn_size * len(all_scores) - len(indices)),
            "filter_groups/surplus_groups": float(len(self.waiting)),
            # Over all responses; critic/score covers only those trained on.
            "filter_groups/score_mean": float(scores.mean()),
            **self._metrics(Batch.concat(_with_all_components(played))),
            **self.loader.metrics(Batch.concat(seen)),
        }

    def collect_drawn(
        self, drawn: Sequence[int], roles: Roles, step: int
    ) -> tuple[Scored, dict[str, float]]:
        """Return the responses to drawn prompts that `step` learns from, and metrics."""
        prompts = self.loader.at(drawn)
        scored = self._responses(prompts, roles, step)
        usable = _usable(scored, self.drop_failed)
        if not len(usable):
            raise self._none_usable(scored, step)
        self._observe(drawn, usable, 0)
        return usable, self._metrics(scored) | self.loader.metrics(prompts)

    def _responses(self, prompts: Prompts, roles: Roles, step: int) -> Scored:
        scored = self.algorithm.collect(prompts, roles, step)
        check_result(self.algorithm.collect, isinstance(scored, Scored), scored, "Scored")
        return scored

    def _metrics(self, scored: Scored) -> dict[str, float]:
        """Return metrics of all responses, also of those that are left out."""
        metrics = agent_metrics(scored)
        if self.drop_failed:
            metrics["reward/num_dropped"] = float(scored.failed.sum())
        return metrics

    def epoch(self) -> int:
        """Return the epoch of the last drawn prompt."""
        return self.loader.epoch_of(max(self.position - 1, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the prompt stream and the sampler's state, for checkpoints."""
        stream = {"epoch": self.epoch(), "position": self.position, "waiting": list(self.waiting)}
        return stream | self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Restore the state of a checkpoint; without a position, derive it from `step`."""
        self.position = state.get("position", step * self.loader.batch_size)
        self.waiting = list(state.get("waiting", ()))
        self.loader.load_state_dict(state)

    @property
    def _drawn_size(self) -> int:
        """Number of prompts generated at a time."""
        return self.gen_batch_size or self.loader.batch_size

    def _next_indices(self, kept: Sequence[int]) -> list[int]:
        """Return the surplus and fresh prompts, if possible none of those `kept` in this step."""
        fresh = max(0, self._drawn_size - len(self.waiting))
        avoid = {*self.waiting, *kept}
        indices = self.waiting
        if fresh:
            indices = [*indices, *self.loader.draw(self.position, fresh, avoid)]
        self.position += fresh
        self.waiting = []
        return indices

    def _observe(self, drawn: Sequence[int], scored: Scored, first: int) -> None:
        """Pass the mean score of each group, numbered from `first`, to the sampler."""
        once = first_rows(scored.episode_of_row)
        group = scored.group[once] - first
        scores = scored.scores[once].double()
        totals = scores.new_zeros(len(drawn)).index_add(0, group, scores)
        counts = torch.bincount(group, minlength=len(drawn))
        found = counts.nonzero().flatten().tolist()
        means = (totals / counts.clamp(min=1)).tolist()
        self.loader.observe([drawn[i] for i in found], [means[i] for i in found])

    def _filtered_values(self, scored: Scored) -> Tensor:
        """Return the values (B,) of the configured metric; the score of rows that lack it."""
        assert self.filter is not None
        # verl's word for the score of a function that has no such component
        values = {"score": scored.scores, "acc": scored.scores} | scored.components
        if self.filter.metric not in values:
            raise ConfigError(
                f"{_SECTION}.metric={self.filter.metric}: the reward has no such component",
                hint=f"use one of: {', '.join(values)}",
            )
        chosen = values[self.filter.metric]
        return torch.where(chosen.isnan(), scored.scores, chosen)

    def _none_usable(self, scored: Scored, step: int) -> RlctlError:
        failed = [episode for episode in scored.episodes if episode.failed]
        if not failed:
            return RlctlError(
                f"step {step}: nothing to learn from, because no group has two responses whose "
                f"reward did not fail{self._first_error()}",
                where="reward.failed=drop",
                hint="`rlctl reward test` scores stored responses",
            )
        outcomes = Counter(episode.outcome for episode in failed)
        alone = "" if len(failed) == len(scored) else " or are alone in their group"
        return RlctlError(
            f"step {step}: nothing to learn from, because all episodes failed{alone}: "
            f"{', '.join(f'{name} {n}×' for name, n in sorted(outcomes.items()))}; "
            f"the first: {failed[0].error}",
            where="actor_rollout_ref.rollout.agent",
            hint="`rlctl env test` runs an environment or a program alone; "
            "actor_rollout_ref.rollout.n=8 leaves groups larger",
        )

    def _too_few(self, num_groups: int, step: int, played: Sequence[Scored]) -> RlctlError:
        assert self.filter is not None
        size = self._drawn_size
        most = self.filter.max_num_gen_batches
        failed = torch.cat([scored.failed for scored in played])
        few = f"step {step}: {most} batches of {size} prompts gave only {num_groups} groups"
        if failed.any():
            number = "every response" if failed.all() else f"{int(failed.sum())} of {len(failed)}"
            return RlctlError(
                f"{few}, and the reward of {number} failed{self._first_error(played)}",
                where=f"{_SECTION}.max_num_gen_batches={most}",
                hint="`rlctl logs RUN` has the first tracebacks, and `rlctl reward test` scores "
                "stored responses",
            )
        return RlctlError(
            f"{few} with different values of {self.filter.metric}",
            where=f"{_SECTION}.max_num_gen_batches={most}",
            hint="use prompts that are neither too easy nor too hard, a larger rollout.n, "
            "a smaller data.train_batch_size, or more batches",
        )

    def _first_error(self, played: Sequence[Scored] = ()) -> str:
        """Return the end of a message: the first error of a reward or of an episode."""
        errors = [episode.error for scored in played for episode in scored.episodes]
        if self.reward is not None:
            errors = [self.reward.first_error, *errors]
        first = next(filter(None, errors), None)
        return f"; the first error: {first}" if first else "; the log has the first error"


def _usable(scored: Scored, drop_failed: bool) -> Scored:
    """Return the rows without failed ones, and without groups of which only one remains.

    Failed are episodes and, with `drop_failed`, responses whose reward call failed.
    """
    kept = torch.tensor([not episode.failed for episode in scored.episodes] or [True] * len(scored))
    if drop_failed:
        kept &= ~scored.failed
    if kept.all():
        return scored
    once = first_rows(scored.episode_of_row)
    sizes = torch.bincount(scored.group[once])
    left = torch.bincount(scored.group[once & kept], minlength=len(sizes))
    kept &= (left >= sizes.clamp(max=2))[scored.group]
    return scored.select(kept.nonzero().flatten())


def _with_all_components(batches: Sequence[Scored]) -> list[Scored]:
    """Add score components that a batch lacks, as NaN, so that batches can be concatenated."""
    names = dict.fromkeys(name for batch in batches for name in batch.components)
    none = [torch.full_like(batch.scores, torch.nan) for batch in batches]
    return [
        replace(batch, components={name: batch.components.get(name, nan) for name in names})
        for batch, nan in zip(batches, none, strict=True)
    ]


def in_varied_group(values: Tensor, group: Tensor) -> Tensor:
    """Return a mask (B,) of the rows in whose `group` (B,) the `values` (B,) are not all equal."""
    stats = group_stats(values, group)
    return (stats.size > 1) & (stats.std > 0)


# Kinds of errors of calls that no tool received. Their names are the policy's text: it can invent
# any number of them, so they are no part of a metric's name.
REFUSED = ("unknown", "malformed", "too_many")


def agent_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Return `agent/*` and `tool/<name>/*` of B episodes; nothing for other responses.

    `agent/outcome/<name>` is the share of the episodes that ended so. `tool/<name>/calls` counts
    the calls of a tool, `…/seconds` is their mean time; `agent/refused_calls/<kind>` counts calls
    that no tool received.
    """
    if not rollouts.episodes:
        return {}
    once = first_rows(rollouts.episode_of_row).nonzero().flatten()
    episodes = [rollouts.episodes[i] for i in once.tolist()]
    outcomes = Counter(episode.outcome for episode in episodes)
    written = float(rollouts.response_mask.values.sum())
    total = len(rollouts.response_ids.values)
    metrics = to_floats(
        spread("agent/turns", torch.tensor([episode.num_turns for episode in episodes]))
    )
    metrics |= {f"agent/outcome/{name}": n / len(episodes) for name, n in sorted(outcomes.items())}
    metrics["agent/num_failed"] = float(sum(episode.failed for episode in episodes))
    metrics["agent/tool_tokens_share"] = 1 - written / total if total else 0.0
    metrics["agent/retokenized_tokens"] = float(
        sum(episode.num_retokenized for episode in episodes)
    )
    uses = [use for episode in episodes for use in episode.uses]
    refused = Counter(use.error for use in uses if use.error in REFUSED)
    metrics |= {f"agent/refused_calls/{kind}": float(refused[kind]) for kind in sorted(refused)}
    run = [use for use in uses if use.error not in REFUSED]
    for tool in sorted({use.tool for use in run}):
        calls = [use for use in run if use.tool == tool]
        errors = Counter(use.error for use in calls)
        metrics |= {
            f"tool/{tool}/calls": float(len(calls)),
            f"tool/{tool}/errors": float(len(calls) - errors[None]),
            f"tool/{tool}/timeouts": float(errors["timeout"]),
            f"tool/{tool}/seconds": sum(use.seconds for use in calls) / len(calls),
        }
    return metrics
