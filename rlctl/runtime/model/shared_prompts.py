"""Attention of several responses to one prompt, whose tokens are in the packed row once.

All other layers process each token alone, so the responses of a group need the tokens of their
prompt once. Only attention combines tokens: a response attends to its prompt and to itself. Equal
to separate rows up to rounding; gradients of the prompt's tokens are those of all its responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.runtime.base.ops import to_device
from rlctl.runtime.model.attention import Packing
from rlctl.runtime.model.kernels import Reach, attend_dense, causal_mask, choose_kernel
from rlctl.runtime.model.rectangles import join_indices, similar

if TYPE_CHECKING:
    from rlctl.runtime.model.gpu_kernels import TokenMap
    from rlctl.runtime.model.mixers import Mixer

# Elements of a mask with a row for each response. Above it, responses to prompts of different
# length have separate rectangles, and all rows of such a rectangle have the same mask.
_MAX_MASK = 2**22


@dataclass(frozen=True, eq=False)
class _Rectangle:
    """`rows` responses padded to `width` queries, with `context` keys each."""

    rows: int
    width: int
    context: int
    visible: Tensor  # (rows or 1, 1, width, context) bool


class _Rectangles(NamedTuple):
    """All responses in rectangles: S queries and U keys in all."""

    shapes: list[_Rectangle]
    tokens: Tensor  # (S,) int64: response token of each query
    keys: Tensor  # (U,) int64: token of each key
    slots: Tensor  # (T,) int64: query of each response token


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """P prompts and their B responses in one packed row: all prompts first, then all responses.

    Implements `TokenAttention`. Prompts have N tokens in all, responses T; built once per
    micro-batch and used by every layer.
    """

    prompts: Packing  # of the N tokens of the prompts
    position_ids: Tensor  # (N + T,) int64: position of each token in its sequence
    lengths: Tensor  # (B,) int64, on the CPU: prompt plus response
    response_lengths: Tensor  # (B,) int64, on the CPU
    prompt_of_row: Tensor  # (B,) int64, on the CPU
    key_of_slot: Tensor  # (Σ lengths,) int64: tokens of each prompt and response, one after another

    @classmethod
    def from_lengths(
        cls,
        prompts: Tensor,
        responses: Tensor,
        prompt_of_row: Tensor,
        device: torch.device | str,
    ) -> SharedPrompts:
        """Pack `prompts` (P,) and `responses` (B,) tokens; `prompt_of_row` (B,) is from 0.

        All arguments are int64 on the CPU, the result is for tensors on `device`.
        """
        num_prompt = int(prompts.sum())
        own_prompt = prompts[prompt_of_row]
        prompt_starts = (prompts.cumsum(0) - prompts)[prompt_of_row]
        starts = num_prompt + responses.cumsum(0) - responses
        row = torch.arange(len(responses)).repeat_interleave(responses)
        tokens = torch.arange(num_prompt, num_prompt + len(row))
        positions = tokens - (starts - own_prompt)[row]
        packing = Packing.from_lengths(prompts, device)

        lengths = own_prompt + responses
        whose = torch.arange(len(lengths)).repeat_interleave(lengths)
        place = torch.arange(len(whose)) - (lengths.cumsum(0) - lengths)[whose]
        in_response = place - own_prompt[whose]
        keys = torch.where(
            in_response < 0, prompt_starts[whose] + place, starts[whose] + in_response
        )

        return cls(
            packing,
            torch.cat([packing.position_ids, to_device(positions, device)]),
            lengths,
            responses,
            prompt_of_row,
            to_device(keys, device),
        )

    @cached_property
    def _rectangles(self) -> _Rectangles:
        """The responses padded to rectangles, which only dense attention needs."""
        prompts = self.prompts.lengths
        responses = self.response_lengths
        device = self.position_ids.device
        own_prompt = prompts[self.prompt_of_row]
        prompt_starts = (prompts.cumsum(0) - prompts)[self.prompt_of_row]
        starts = responses.cumsum(0) - responses
        num_prompt = int(prompts.sum())
        shapes: list[_Rectangle] = []
        tokens: list[Tensor] = []
        keys: list[Tensor] = []
        slots = torch.empty(int(responses.sum()), dtype=torch.int64)
        num_slots = 0
        for rows in _sets(responses, own_prompt):
            visible, query, key = _rectangle(
                responses[rows], num_prompt + starts[rows], own_prompt[rows], prompt_starts[rows]
            )
            width, context = visible.shape[2:]
            real = (torch.arange(width) < responses[rows, None]).flatten()
            tokens.append(query - num_prompt)
            keys.append(key)
            slots[tokens[-1][real]] = num_slots + real.nonzero().squeeze(1)
            num_slots += len(real)
            shapes.append(_Rectangle(len(rows), width, context, to_device(visible, device)))
        indices = (join_indices(tokens), join_indices(keys), slots)
        return _Rectangles(shapes, *(to_device(index, device) for index in indices))

    @cached_property
    def _varlen(self) -> tuple[Tensor, Tensor, int, int]:
        """Boundaries of queries and keys, (P + B + 1,) int32, and the longest of each."""
        prompts = self.prompts.lengths
        queries = torch.cat([prompts, self.response_lengths])
        keys = torch.cat([prompts, self.lengths])
        first, second = (
            to_device(F.pad(x.cumsum(0), (1, 0)).to(torch.int32), self.position_ids.device)
            for x in (queries, keys)
        )
        return first, second, int(queries.max()), int(keys.max())

    @cached_property
    def token_map(self) -> TokenMap:
        """Prompt and response of each token, for FlexAttention."""
        from rlctl.runtime.model.gpu_kernels import TokenMap

        rows = torch.arange(len(self.response_lengths)).repeat_interleave(self.response_lengths)
        of_prompts = self.prompts.token_map
        row = to_device(rows, self.position_ids.device)
        prompt = to_device(self.prompt_of_row[rows], self.position_ids.device)
        return TokenMap(
            torch.cat([of_prompts.prompt, prompt]),
            torch.cat([of_prompts.response, row]),
            self.position_ids,
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """See `TokenAttention`: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D) of all tokens."""
        n = len(self.prompts.position_ids)
        kernel = choose_kernel(query, reach)
        if kernel == "varlen":
            return self._attend_varlen(query, key, value, reach)
        if kernel == "flex":
            return self.token_map.attend(query, key, value, reach)
        first = self.prompts.attend(layer, query[:n], key[:n], value[:n], reach)
        # One selection for all rectangles: the gradient of each is as large as all tokens.
        shapes, tokens, keys, slots = self._rectangles
        query = query[n:].index_select(0, tokens)
        key, value = (x.index_select(0, keys) for x in (key, value))
        num_queries = [rectangle.rows * rectangle.width for rectangle in shapes]
        num_keys = [rectangle.rows * rectangle.context for rectangle in shapes]
        parts = []
        for rectangle, *qkv in zip(
            shapes,
            query.split(num_queries),
            key.split(num_keys),
            value.split(num_keys),
            strict=True,
        ):
            # (rows, heads, width or context, D)
            q, k, v = (x.unflatten(0, (rectangle.rows, -1)).transpose(1, 2) for x in qkv)
            visible = rectangle.visible
            if reach.window is not None:
                # All prompts end in the same column, so columns are as far apart as tokens.
                visible = visible & causal_mask(
                    rectangle.width, rectangle.context, reach.window, q.device
                )
            part = attend_dense(q, k, v, reach, visible.expand(rectangle.rows, -1, -1, -1))
            parts.append(part.transpose(1, 2).flatten(0, 1))
        return torch.cat([first, torch.cat(parts).index_select(0, slots)])

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """See `TokenAttention`: (T, C) -> (T, C). Each response mixes its prompt again."""
        mixed = self._rows.mix(hidden.index_select(0, self.key_of_slot), mixer)
        return mixed.index_select(0, self._slot_of_token)

    @cached_property
    def _rows(self) -> Packing:
        """The prompt and response of each row, one after another."""
        return Packing.from_lengths(self.lengths, self.position_ids.device)

    @cached_property
    def _slot_of_token(self) -> Tensor:
        """A place of each token in `key_of_slot`: (N + T,) int64."""
        slot = torch.empty_like(self.position_ids)
        slot[self.key_of_slot] = torch.arange(len(self.key_of_slot), device=slot.device)
        return slot

    def _attend_varlen(self, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """Run flash attention, whose last query of a row attends to all its keys.

        (N + T, H, D), (N + T, K, D), (N + T, K, D) -> (N + T, H, D), half precision.
        """
        from rlctl.runtime.model.gpu_kernels import attend_varlen

        n = len(self.prompts.position_ids)
        key, value = (torch.cat([x[:n], x.index_select(0, self.key_of_slot)]) for x in (key, value))
        first, second, longest_query, longest_key = self._varlen
        longest = (longest_query, longest_key)
        return attend_varlen(query, key, value, reach, (first, second), longest)


def _sets(responses: Tensor, prompts: Tensor) -> list[Tensor]:
    """Return the rows (N,) int64 of each rectangle, for responses and their prompts (B,) tokens."""
    found: list[Tensor] = []
    for rows in similar(responses):
        width = int(responses[rows].max())
        longest = int(prompts[rows].max())
        if len(rows) * width * (width + longest) <= _MAX_MASK:
            found.append(rows)
        else:
            found += [rows[prompts[rows] == length] for length in prompts[rows].unique()]
    return found


def _rectangle(
    responses: Tensor, starts: Tensor, prompts: Tensor, prompt_starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Build the rectangle of N rows from the lengths and first tokens of each, (N,) int64.

    Returns which keys are visible, (N or 1, 1, width, context) bool, the token of each query
    (N·width,) and of each key (N·context,), int64.
    """
    width = int(responses.max())
    longest = int(prompts.max())
    column = torch.arange(width)
    tokens = starts[:, None] + torch.minimum(column, responses[:, None] - 1)
    # Prompts end in the same column; the slots before a shorter one repeat its first token.
    place = torch.arange(longest) - (longest - prompts[:, None])  # (N, longest)
    keys = torch.cat([prompt_starts[:, None] + place.clamp(min=0), tokens], 1)
    if (prompts == longest).all():
        place = place[:1]  # all rows have the same mask
    causal = (column <= column[:, None]).expand(len(place), -1, -1)
    before = (place >= 0)[:, None].expand(-1, width, -1)
    visible = torch.cat([before, causal], 2)[:, None]
    return visible, tokens.flatten(), keys.flatten()
