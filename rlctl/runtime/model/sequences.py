"""Prompts and responses as one packed row for a model, and where in it the responses are predicted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.runtime.batch import Ragged, concat_ragged
from rlctl.runtime.model.attention import Packing


@dataclass(frozen=True, eq=False)
class Sequences:
    """B sequences end to end. `predictors[i]` is the position whose output predicts response token `targets[i]`."""

    ids: Tensor  # (T,) int64
    packing: Packing
    predictors: Tensor  # (T_response,) int64
    targets: Tensor  # (T_response,) int64

    @classmethod
    def from_ragged(cls, prompt_ids: Ragged, response_ids: Ragged) -> Sequences:
        """Every prompt must hold at least one token: the first response token is predicted from the last of the prompt."""
        whole = concat_ragged(prompt_ids, response_ids)
        # In the flat row, response token j of row b stands behind the prompts of rows 0..b and the responses before it.
        position = torch.arange(len(response_ids.values), device=whole.values.device)
        predictors = position + prompt_ids.lengths.cumsum(0)[response_ids.row_of_token] - 1
        return cls(
            whole.values,
            Packing.from_lengths(whole.lengths, whole.values.device),
            predictors,
            response_ids.values,
        )
