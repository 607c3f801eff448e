"""Prompts and responses as one packed row, with the positions that predict response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.runtime.batch import Ragged
from rlctl.runtime.model.attention import Packing


@dataclass(frozen=True, eq=False)
class Sequences:
    """B packed sequences; the output at `predictors[i]` predicts response token `targets[i]`."""

    ids: Tensor  # (T,) int64
    packing: Packing
    predictors: Tensor  # (T_response,) int64
    targets: Tensor  # (T_response,) int64
    candidates: Tensor | None = None  # (T_response, K) int64: further tokens to score

    @classmethod
    def from_ragged(
        cls, prompt_ids: Ragged, response_ids: Ragged, candidates: Ragged | None = None
    ) -> Sequences:
        """Pack prompts and responses of B rows, with `candidates` (T, K) for response tokens.

        Prompts must not be empty: the last prompt token predicts the first response token.
        """
        packed = concat_ragged(prompt_ids, response_ids)
        # A response token of row b follows the prompts of rows 0..b and all earlier responses.
        position = torch.arange(len(response_ids.values), device=packed.values.device)
        predictors = position + prompt_ids.lengths.cumsum(0)[response_ids.row_of_token] - 1
        return cls(
            packed.values,
            Packing.from_lengths(packed.lengths, packed.values.device),
            predictors,
            response_ids.values,
            candidates.values if candidates is not None else None,
        )


def concat_ragged(first: Ragged, second: Ragged) -> Ragged:
    """Append row i of `second` to row i of `first`: values (T1,), (T2,) -> (T1 + T2,), B rows."""
    lengths = torch.cat([first.lengths, second.lengths])
    both = Ragged(torch.cat([first.values, second.values]), lengths)
    # row 0 of first, row 0 of second, row 1 of first, ...
    order = torch.arange(2 * len(first)).view(2, len(first)).T.reshape(-1)
    return Ragged(both.select(order).values, first.lengths + second.lengths)
