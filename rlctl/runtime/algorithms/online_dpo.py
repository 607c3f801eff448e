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
from rlctl.runtime.algorithms.base import Needs, step_seed
from rlctl.runtime.algorithms.pair_losses import PairAlgorithm, PairParams
from rlctl.runtime.batch import Scored
from rlctl.runtime.ops import first_rows


class OnlineDPOParams(PairParams):
    """Settings of `online_dpo`."""

    pairs: Literal["best_worst", "all", "random"] = Field(
        default="best_worst",
        description="pairs of a prompt: one of best and worst, all, or one at random",
    )


@dataclass(frozen=True)
class OnlineDPO(PairAlgorithm[OnlineDPOParams]):
    """DPO on pairs of the policy's own responses; immutable."""

    Params: ClassVar[type[OnlineDPOParams]] = OnlineDPOParams

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int, params: OnlineDPOParams) -> Self:
        """Build the algorithm. Raises ConfigError for one response per prompt."""
        if config.actor_rollout_ref.rollout.n < 2:
            raise ConfigError(
                f"algorithm.name={config.algorithm.name} compares the responses to one prompt, "
                "but rollout.n is 1",
                hint="actor_rollout_ref.rollout.n=8",
            )
        return super().from_config(config, num_steps, params)

    @property
    def needs(self) -> Needs:
        """Groups of responses, and the reference if the loss has one."""
        return super().needs | Needs.GROUPS | Needs.COMPARISON

    def _pairs(self, scored: Scored, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(step_seed(self.seed, step))
        pairs, once = [torch.empty(0, 2, dtype=torch.int64)], first_rows(scored.episode_of_row)
        for group in scored.group.unique().tolist():
            rows = (once & (scored.group == group)).nonzero().flatten()
            gap = scored.scores[rows, None] - scored.scores[rows]  # (n, n)
            better = (gap > 0).nonzero()
            if len(better) and self.params.pairs == "best_worst":
                better = better[gap[better[:, 0], better[:, 1]].argmax()][None]
            elif len(better) and self.params.pairs == "random":
                better = better[torch.randint(len(better), (1,), generator=draw)]
            pairs.append(rows[better])
        return torch.cat(pairs)
