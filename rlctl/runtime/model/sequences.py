"""Prompts and responses as one packed row, with the positions that predict response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.base.ops import first_rows, to_device
from rlctl.runtime.model.attention import Packing, TokenAttention

if TYPE_CHECKING:
    from rlctl.runtime.base.image_processor import Images
    from rlctl.runtime.model.routing import Routing
    from rlctl.runtime.model.vision import Vision


class Packed(TokenAttention, Protocol):
    """Attention among packed tokens, and their positions."""

    @property
    def position_ids(self) -> Tensor:
        """Position of each token in its sequence: (T,) int64."""
        ...


@dataclass(frozen=True, eq=False)
class Sequences:
    """B packed sequences; the output at `predictors[i]` predicts response token `targets[i]`."""

    ids: Tensor  # (T,) int64
    packing: Packed
    predictors: Tensor  # (T_response,) int64
    targets: Tensor  # (T_response,) int64
    last: Tensor  # (B,) int64: the last token of each row
    candidates: Tensor | None = None  # (T_response, K) int64: further tokens to score
    routing: Routing | None = None  # experts of the tokens, of mixtures
    # (N,) int64: packed token of each token of the rows, which may share prompts; None: the same.
    token_of_rows: Tensor | None = None
    prompt_rows: list[int] | None = None  # a row of each packed prompt; None: that of each row
    vision: Vision | None = None  # images of the rows, of vision-language models

    @classmethod
    def from_ragged(
        cls,
        prompt_ids: Ragged,
        response_ids: Ragged,
        candidates: Ragged | None = None,
        prompt_of_row: Tensor | None = None,
        routing: Ragged | None = None,
    ) -> Sequences:
        """Pack prompts and responses of B rows, with `candidates` (T, K) for response tokens.

        Prompts must not be empty: the last prompt token predicts the first response token. Rows
        with the same number in `prompt_of_row` (B,), on the CPU, have the same prompt; its tokens
        are computed once. `routing` (N, L, K) are the experts of the rows' tokens.
        """
        others = candidates.values if candidates is not None else None
        if prompt_of_row is not None:
            numbers, of_row = prompt_of_row.unique(return_inverse=True)
            if len(numbers) < len(of_row):
                return cls._sharing(prompt_ids, response_ids, others, of_row, routing)
        packed = concat_ragged(prompt_ids, response_ids)
        # A response token of row b follows the prompts of rows 0..b and all earlier responses.
        device = packed.values.device
        lengths = response_ids.lengths
        position = torch.arange(len(response_ids.values))
        predictors = position + prompt_ids.lengths.cumsum(0).repeat_interleave(lengths) - 1
        return cls(
            packed.values,
            Packing.from_lengths(packed.lengths, device),
            to_device(predictors, device),
            response_ids.values,
            to_device(packed.lengths.cumsum(0) - 1, device),
            others,
            _given(routing.values) if routing is not None else None,
        )

    @classmethod
    def _sharing(
        cls,
        prompt_ids: Ragged,
        response_ids: Ragged,
        candidates: Tensor | None,
        prompt_of_row: Tensor,
        routing: Ragged | None,
    ) -> Sequences:
        """Pack P prompts, then B responses; `prompt_of_row` (B,) is from 0 to P − 1."""
        device = response_ids.values.device
        lengths = response_ids.lengths
        rows = first_rows(prompt_of_row).nonzero().squeeze(1)
        rows = rows[prompt_of_row[rows].argsort()]
        prompts = prompt_ids.select(rows)
        ends = prompts.lengths.cumsum(0) - 1
        starts = len(prompts.values) + response_ids.offsets[:-1]
        before = ends[prompt_of_row]  # token before the response of each row
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        position = torch.arange(len(row))
        predictors = torch.where(
            position == response_ids.offsets[:-1][row],
            before[row],
            len(prompts.values) + position - 1,
        )
        from rlctl.runtime.model.shared_prompts import SharedPrompts

        packing = SharedPrompts.from_lengths(prompts.lengths, lengths, prompt_of_row, device)
        given: Routing | None = None
        if routing is not None:  # that of a prompt is equal in its rows
            from rlctl.runtime.model.routing import OWN

            values = routing.values
            packed = values.new_full((len(packing.position_ids), *values.shape[1:]), OWN)
            packed[packing.key_of_slot] = values
            given = _given(packed)
        return cls(
            torch.cat([prompts.values, response_ids.values]),
            packing,
            to_device(predictors, device),
            response_ids.values,
            to_device(torch.where(lengths > 0, starts + lengths - 1, before), device),
            candidates,
            given,
            packing.key_of_slot,
            rows.tolist(),
        )

    def with_images(
        self, hf: PreTrainedModel, prompts: Ragged, responses: Ragged, images: Sequence[Images]
    ) -> Sequences:
        """Return the same sequences with the images of their B rows, if there are any.

        The first images of a row are those of its prompt, the others of replies in its response.
        `prompts` and `responses` are those of `from_ragged`, on the CPU. Raises RlctlError if
        tokens and images of a row do not agree.
        """
        if not any(images):
            return self
        from rlctl.runtime.model.image_rows import with_images

        return with_images(self, hf, (prompts, responses), images)

    def recorded(self, dtype: torch.dtype) -> Sequences:
        """Return the same sequences, whose pass keeps the experts of tokens in `dtype`."""
        from rlctl.runtime.model.routing import Routing

        return replace(self, routing=Routing(None, dtype))

    def own_routing(self) -> Tensor:
        """Return the experts that the model chose for the tokens of the rows: (N, L, K)."""
        assert self.routing is not None, "the pass records"
        choices = self.routing.choices()
        return choices if self.token_of_rows is None else choices[self.token_of_rows]


def prompt_numbers(
    prompt_ids: Ragged, routing: Ragged | None = None, images: Sequence[Images] = ()
) -> Tensor:
    """Number B prompts on the CPU: (B,) int64 from 0, equal for equal tokens, experts and images.

    `routing` (N, L, K) are those of the rows' tokens, prompts first.
    """
    numbers: dict[tuple[bytes, Images], int] = {}
    keys = [row.numpy().tobytes() for row in prompt_ids.rows()]
    if routing is not None:
        lengths = prompt_ids.lengths.tolist()
        of_rows = zip(keys, routing.rows(), lengths, strict=True)
        keys = [key + row[:length].numpy().tobytes() for key, row, length in of_rows]
    both = zip(keys, images or [()] * len(keys), strict=True)
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in both])


def concat_ragged(first: Ragged, second: Ragged) -> Ragged:
    """Append row i of `second` to row i of `first`: values (T1,), (T2,) -> (T1 + T2,), B rows."""
    lengths = torch.cat([first.lengths, second.lengths])
    both = Ragged(torch.cat([first.values, second.values]), lengths)
    # row 0 of first, row 0 of second, row 1 of first, ...
    order = torch.arange(2 * len(first)).view(2, len(first)).T.reshape(-1)
    return Ragged(both.select(order).values, first.lengths + second.lengths)


def _given(experts: Tensor) -> Routing:
    """Return the choices `experts` (T, L, K) that a pass replays."""
    from rlctl.runtime.model.routing import Routing

    return Routing(experts, experts.dtype)
