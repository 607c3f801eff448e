"""Reward-ranked fine-tuning (RAFT): supervised learning on the best of the policy's responses.

Each step is an iteration of algorithm 1 of arXiv 2304.06767: generate `rollout.n` responses to each
prompt with the current policy, keep the best by score, and fine-tune on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlctl.plugins import Params as PluginParams
from rlctl.runtime.algorithms.base import (
    AGGREGATION_KEYS,
    PPO_KEYS,
    Loss,
    Needs,
    PolicyAlgorithm,
    rows_of_groups,
)
from rlctl.runtime.algorithms.sft import negative_log_likelihood
from rlctl.runtime.base.batch import Rollouts, Scored
from rlctl.runtime.base.metrics import Mean, Metrics, merge
from rlctl.runtime.base.ops import PolicyOutputs, first_rows
from rlctl.runtime.base.roles import Roles


class RaftParams(PluginParams):
    """Settings of `raft`."""

    top_k: int | None = Field(default=1, ge=1, description="best responses of a prompt; null = all")
    threshold: float | None = Field(
        default=None, description="smallest score of a response that is kept; null = any"
    )


@dataclass(frozen=True)
class RAFT(PolicyAlgorithm[RaftParams]):
    """Fine-tuning on the policy's responses, selected by score; immutable."""

    Params: ClassVar[type[RaftParams]] = RaftParams

    @property
    def needs(self) -> Needs:
        """Responses to each prompt."""
        return Needs.ENGINE | Needs.GROUPS

    unused_keys: ClassVar = (*PPO_KEYS, *AGGREGATION_KEYS, "trainer.mismatch.*")

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """Update the actor once per mini-batch with the responses that are kept."""
        kept = self.kept(scored)
        best = kept & first_rows(scored.episode_of_row)
        num_kept = float(best.sum())
        metrics: Metrics = {
            "raft/kept": Mean(num_kept, int(scored.episode_of_row.max()) + 1),
            "raft/kept_prompts": Mean(
                float(len(scored.group[kept].unique())), len(scored.group.unique())
            ),
        }
        if num_kept:
            metrics["raft/kept_score"] = Mean(float(scored.scores[best].sum()), num_kept)
        batch = scored.select(kept.nonzero().flatten())
        updates = [metrics]
        for rows in rows_of_groups(scored.group, batch.group, self.actor, step):
            updates.append(roles.actor.update(batch.select(rows), self.schedule(step - 1)))
        return merge(updates)

    def loss(self, outputs: PolicyOutputs, batch: Rollouts) -> Loss:
        """Return −Σ log π over the tokens of kept responses, and their number."""
        return negative_log_likelihood(outputs, batch)

    def kept(self, scored: Scored) -> Tensor:
        """Return a mask (B,) of the rows to learn from.

        Selects the `top_k` best episodes of each group with a score of at least `threshold`; of
        equal scores, the first.
        """
        scores = scored.scores
        episode = scored.episode_of_row
        once = first_rows(episode)
        best = torch.zeros_like(scores, dtype=torch.bool)
        for number in scored.group.unique():
            rows = (once & (scored.group == number)).nonzero().flatten()
            order = scores[rows].argsort(descending=True, stable=True)
            best |= torch.isin(episode, episode[rows[order][: self.params.top_k]])
        if self.params.threshold is None:
            return best
        return best & (scores >= self.params.threshold)
