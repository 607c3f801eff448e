"""Where the answers of a step come from: one batch of prompts, or with `algorithm.filter_groups` as many as it takes.

A prompt whose answers all score the same teaches a group estimator nothing. DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) leaves
such groups out and generates further batches until `train_batch_size` groups are left that differ. What is beyond that is not trained on:
its prompts come first in the next step, and are answered anew by the policy of that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Algorithm, Needs
from rlctl.runtime.batch import Batch, Scored
from rlctl.runtime.data.loader import PromptLoader
from rlctl.runtime.ops import group_stats
from rlctl.runtime.roles import Roles

_SECTION = "algorithm.filter_groups"


@dataclass
class Collector:
    """Asks, answers and scores. With a filter it has a state: `position` is the place in the stream of prompts of the next one, `waiting`
    are the places of those that come before it."""

    loader: PromptLoader
    algorithm: Algorithm
    filter: schema.FilterGroups | None  # None: one batch of prompts is one step
    position: int = 0
    waiting: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, loader: PromptLoader, algorithm: Algorithm, config: schema.Algorithm) -> Self:
        """Only where an algorithm answers a prompt several times is there anything to filter."""
        filters = config.filter_groups.enable and Needs.GROUPS in algorithm.needs
        return cls(loader, algorithm, config.filter_groups if filters else None)

    def collect(self, roles: Roles, step: int) -> tuple[Scored, dict[str, float]]:
        """The answers that `step` learns from, in groups that count from 0, and what there is to say of the others.

        Raises `RlctlError` where `max_num_gen_batches` have not given enough groups.
        """
        size = self.loader.batch_size
        if self.filter is None:
            self.position = step * size
            return self.algorithm.collect(self.loader.batch_at(step), roles, step), {}
        kept: list[Scored] = []
        places: list[int] = []  # of the prompts that differ
        all_scores: list[Tensor] = []
        while len(places) < size:
            if len(all_scores) == self.filter.max_num_gen_batches:
                raise self._too_few(len(places), step)
            asked = self._next_places()
            prompts = self.loader.at(asked)
            number = len(all_scores) * size  # rows of one step have different random streams
            scored = self.algorithm.collect(
                replace(prompts, group=prompts.group + number), roles, step
            )
            all_scores.append(scored.scores)
            kept.append(
                scored.select(differing(self._judged(scored), scored.group).nonzero().flatten())
            )
            places += [
                asked[group - number] for group in kept[-1].group.unique_consecutive().tolist()
            ]
        self.waiting = places[size:]
        whole = Batch.concat(_with_all_components(kept))
        _, group = whole.group.unique_consecutive(return_inverse=True)
        scores = torch.cat(all_scores)
        return replace(whole, group=group).select((group < size).nonzero().flatten()), {
            "filter_groups/num_gen_batches": float(len(all_scores)),
            "filter_groups/evicted_groups": float(size * len(all_scores) - len(places)),
            "filter_groups/surplus_groups": float(len(self.waiting)),
            "filter_groups/score_mean": float(
                scores.mean()
            ),  # of all answers; critic/score is of those that are learnt from
        }

    def epoch(self) -> int:
        """Of the prompt that was drawn last."""
        return self.loader.epoch_of(max(self.position - 1, 0))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch(), "position": self.position, "waiting": list(self.waiting)}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Take up what a checkpoint of `step` holds; one from before there was a filter has no position."""
        self.position = state.get("position", step * self.loader.batch_size)
        self.waiting = list(state.get("waiting", ()))

    def _next_places(self) -> list[int]:
        fresh = self.loader.batch_size - len(self.waiting)
        places = [*self.waiting, *range(self.position, self.position + fresh)]
        self.position, self.waiting = self.position + fresh, []
        return places

    def _judged(self, scored: Scored) -> Tensor:
        """What must differ within a group: (B,)."""
        assert self.filter is not None
        values = {"score": scored.scores} | scored.components
        if self.filter.metric not in values:
            raise ConfigError(
                f"{_SECTION}.metric={self.filter.metric}: the reward gives no such component",
                hint=f"one of {', '.join(values)}",
            )
        return values[self.filter.metric]

    def _too_few(self, num_groups: int, step: int) -> RlctlError:
        assert self.filter is not None
        size, most = self.loader.batch_size, self.filter.max_num_gen_batches
        return RlctlError(
            f"step {step}: after {most} batches of {size} prompts only {num_groups} have answers that differ in {self.filter.metric}",
            where=f"{_SECTION}.max_num_gen_batches={most}",
            hint="prompts that are neither too easy nor too hard, a larger rollout.n, a smaller data.train_batch_size, or more batches",
        )


def _with_all_components(batches: Sequence[Scored]) -> list[Scored]:
    """A component of the score that no answer of a batch has is 0 there, as it is in a batch where only some have it."""
    names = dict.fromkeys(name for batch in batches for name in batch.components)
    zeros = [torch.zeros_like(batch.scores) for batch in batches]
    return [
        replace(batch, components={name: batch.components.get(name, zero) for name in names})
        for batch, zero in zip(batches, zeros, strict=True)
    ]


def differing(values: Tensor, group: Tensor) -> Tensor:
    """For each row whether the values (B,) of its group are not all the same: (B,) bool."""
    stats = group_stats(values, group)
    return (stats.size > 1) & (stats.std > 0)
