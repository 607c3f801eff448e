"""Direct preference optimization (arXiv 2305.18290): on the pairs of a data set, and online.

With `dpo` the pairs' responses take the place of sampled ones. A row of the data gives two rows of
a batch: the response at `data.chosen_key` with score 1, and the one at `data.rejected_key` with
score 0.

With `online_dpo` pairs are scored responses of the policy itself: direct alignment from AI feedback
(arXiv 2402.04792) with the run's reward, a rule or a model, as annotator. A step generates
`rollout.n` responses to each prompt, pairs responses with different scores, and updates the policy
with a pair loss against the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from rlctl.data_prep.row_fields import RowField
from rlctl.errors import ConfigError
from rlctl.plugins.objectives.pair_losses import PairAlgorithm, PairParams
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Needs, step_seed
from rlctl.runtime.algorithms.sft import GivenResponses
from rlctl.runtime.base.batch import Prompts, Scored
from rlctl.runtime.base.ops import first_rows
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.data.conversations import pair_fields, pair_texts


@dataclass(frozen=True)
class DPO(PairAlgorithm[PairParams]):
    """DPO, IPO, cDPO or SimPO on given pairs, at temperature 1."""

    Params: ClassVar[type[PairParams]] = PairParams

    has_rewards: ClassVar = False  # its scores only order each pair
    unused_keys: ClassVar = (
        *PairAlgorithm.unused_keys,
        "trainer.mismatch.*",
        "actor_rollout_ref.rollout.temperature",
    )

    def collect(self, prompts: Prompts, roles: Roles, step: int) -> Scored:  # noqa: ARG002
        """Return the data's responses, truncated to `max_response_length`: 2·B rows."""
        texts = [text for row in prompts.rows for text in pair_texts(row, self.data)]
        scores = torch.tensor([1.0, 0.0]).repeat(len(prompts))
        return self._given.to_scored(prompts.repeat(2), texts, scores)

    @property
    def row_fields(self) -> Sequence[RowField]:
        """Both responses."""
        return pair_fields(self.data)

    @cached_property
    def _given(self) -> GivenResponses:
        return GivenResponses(self.model, self.data.max_response_length)

    def _pairs(self, scored: Scored, step: int) -> Tensor:  # noqa: ARG002
        return torch.arange(len(scored)).view(-1, 2)


class OnlineDPOParams(PairParams):
    """Settings of `online_dpo`."""

    pairs: Literal["best_worst", "all", "random"] = Field(
        default="best_worst",
        description="pairs of a prompt: one of best and worst, all, or one at random",
    )


@dataclass(frozen=True)
class OnlineDPO(PairAlgorithm[OnlineDPOParams]):
    """DPO on pairs of the policy's responses; immutable."""

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
        pairs = [torch.empty(0, 2, dtype=torch.int64)]
        once = first_rows(scored.episode_of_row)
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
