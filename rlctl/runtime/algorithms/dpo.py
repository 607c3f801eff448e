"""Direct preference optimization (arXiv 2305.18290) on the pairs of a data set.

The pairs' responses take the place of sampled ones. A row of the data gives two rows of a batch:
the response at `data.chosen_key` with score 1, and the one at `data.rejected_key` with score 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from rlctl.runtime.algorithms.given_responses import GivenResponses
from rlctl.runtime.algorithms.pair_losses import PairAlgorithm, PairParams
from rlctl.runtime.batch import Prompts, Scored
from rlctl.runtime.data.fields import pair_texts
from rlctl.runtime.roles import Roles


@dataclass(frozen=True)
class DPO(PairAlgorithm[PairParams]):
    """DPO, IPO, cDPO or SimPO on given pairs, at temperature 1."""

    Params: ClassVar[type[PairParams]] = PairParams

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

    @cached_property
    def _given(self) -> GivenResponses:
        return GivenResponses(self.model, self.data.max_response_length)

    def _pairs(self, scored: Scored, step: int) -> Tensor:  # noqa: ARG002
        return torch.arange(len(scored)).view(-1, 2)
