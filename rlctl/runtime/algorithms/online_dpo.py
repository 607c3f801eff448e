"""Online DPO: preference pairs from scored responses of the policy itself.

Direct alignment from AI feedback (arXiv 2402.04792) with the run's reward, a rule or a model, as
annotator. A step generates `rollout.n` responses to each prompt, pairs responses with different
scores, and updates the policy with a pair loss against the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import (
    AGGREGATION_KEYS,
    PPO_KEYS,
    Loss,
    Needs,
    Stateless,
    rows_of_groups,
    sample,
    sampling_seed,
    step_seed,
)
from rlctl.runtime.algorithms.pair_losses import PairParams, PairRows, pair_loss, pair_rows
from rlctl.runtime.algorithms.schedule import Schedule
from rlctl.runtime.batch import Prompts, Ragged, Rollouts, Scored
from rlctl.runtime.model.causal_lm import PolicyOutputs
from rlctl.runtime.ops import first_rows
from rlctl.runtime.roles import Roles
from rlctl.tracking.metrics import Metrics, Sum, merge


class OnlineDPOParams(PairParams):
    """Settings of `online_dpo`."""

    pairs: Literal["best_worst", "all", "random"] = Field(
        default="best_worst",
        description="pairs of a prompt: one of best and worst, all, or one at random",
    )


@dataclass(frozen=True)
class OnlineDPO(Stateless):
    """DPO on pairs of the policy's own responses; immutable."""

    Params: ClassVar[type[PairParams]] = OnlineDPOParams

    actor: schema.Actor
    data: schema.Data
    model: schema.Model
    params: PairParams
    seed: int
    schedule: Schedule

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int, params: PairParams) -> Self:
        """Build the algorithm. Raises ConfigError for one response per prompt, if it samples."""
        actor = config.actor_rollout_ref.actor
        built = cls(
            actor=actor,
            data=config.data,
            model=config.actor_rollout_ref.model,
            params=params,
            seed=sampling_seed(config),
            schedule=Schedule.from_config(actor.optim, num_steps),
        )
        if Needs.COMPARISON in built.needs and config.actor_rollout_ref.rollout.n < 2:
            raise ConfigError(
                f"algorithm.name={config.algorithm.name} compares the responses to one prompt, "
                "but rollout.n is 1",
                hint="actor_rollout_ref.rollout.n=8",
            )
        return built

    @property
    def needs(self) -> Needs:
        """Groups of responses, and the reference if the loss has one."""
        needs = Needs.ENGINE | Needs.GROUPS | Needs.COMPARISON
        return needs | Needs.REFERENCE if self.params.uses_reference else needs

    unused_keys: ClassVar = dict.fromkeys((*PPO_KEYS, *AGGREGATION_KEYS), "")

    def collect(self, prompts: Prompts, roles: Roles, step: int) -> Scored:
        """Generate `rollout.n` responses to each prompt and score them."""
        return sample(prompts, roles, step_seed(self.seed, step))

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """Pair the responses and update the actor once per mini-batch; return metrics."""
        groups, pairs = scored.group, self._pairs(scored, step)  # (P, 2)
        episode = scored.episode_of_row
        kept = torch.isin(episode, episode[pairs]).nonzero().flatten()
        scored, pairs = scored.select(kept), torch.searchsorted(kept, pairs)
        reference: Ragged | None = None
        if self.params.uses_reference and len(kept):
            reference = roles.reference.compute_log_probs(scored).log_probs
        updates: list[Metrics] = [{"pairs/count": Sum(0.0)}]
        for rows in rows_of_groups(groups, scored.group, self.actor, step):
            mine = torch.searchsorted(rows, pairs[torch.isin(pairs[:, 0], rows)])
            batch, ref = scored.select(rows), reference and reference.select(rows)
            now = roles.actor.compute_log_probs(batch).log_probs
            batch, metrics = pair_rows(batch, now, ref, mine, self.params)
            updates += [metrics, roles.actor.update(batch, self.schedule(step - 1))]
        return merge(updates)

    def loss(self, outputs: PolicyOutputs, batch: Rollouts) -> Loss:
        """Return the pair loss of a micro-batch; `outputs` hold (T,)."""
        assert isinstance(batch, PairRows)
        return pair_loss(outputs.log_probs, batch)

    def _pairs(self, scored: Scored, step: int) -> Tensor:
        """Return the first rows of better and worse episodes of a prompt: (P, 2) int64."""
        assert isinstance(self.params, OnlineDPOParams)
        draw = torch.Generator().manual_seed(step_seed(self.seed, step))
        found, once = [torch.empty(0, 2, dtype=torch.int64)], first_rows(scored.episode_of_row)
        for group in scored.group.unique().tolist():
            rows = (once & (scored.group == group)).nonzero().flatten()
            gap = scored.scores[rows, None] - scored.scores[rows]  # (n, n)
            better = (gap > 0).nonzero()
            if len(better) and self.params.pairs == "best_worst":
                better = better[gap[better[:, 0], better[:, 1]].argmax()][None]
            elif len(better) and self.params.pairs == "random":
                better = better[torch.randint(len(better), (1,), generator=draw)]
            found.append(rows[better])
        return torch.cat(found)
