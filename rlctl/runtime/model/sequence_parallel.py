"""Sequence parallelism: several ranks compute one packed row, each a slice of its tokens.

All layers but attention process each token alone. Before attention, the ranks exchange their slices
of tokens for slices of heads, and back after it (DeepSpeed Ulysses, arXiv 2309.14509), so attention
sees all tokens. Its result, and the gradient summed over the ranks, equal those of one rank up to
rounding.

Axes: T packed tokens, S ranks, L = ⌈T / S⌉ tokens of each, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlctl.errors import InternalError
from rlctl.runtime.base.ops import ceil_div
from rlctl.runtime.model.kernels import Reach
from rlctl.runtime.model.rank_exchange import exchange
from rlctl.runtime.model.routing import OWN, Routing
from rlctl.runtime.model.sequences import Packed, Sequences

if TYPE_CHECKING:
    from rlctl.runtime.model.mixers import Mixer


@dataclass(frozen=True)
class SequenceGroup:
    """The S ranks that compute the same rows, and this rank's place among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def slice(self, sequences: Sequences) -> Slice:
        """Return this rank's tokens of `sequences`, which are equal on all ranks of the group.

        The last slices are padded with token 0 up to the length of the first.
        """
        num_tokens = len(sequences.ids)
        length = ceil_div(num_tokens, self.size)
        start = self.rank * length
        padding = (0, length * self.size - num_tokens)
        ids, positions = (
            F.pad(column, padding)[start : start + length]
            for column in (sequences.ids, sequences.packing.position_ids)
        )
        of_tokens, of_rows = (
            ((positions >= start) & (positions < start + length)).nonzero().squeeze(1)
            for positions in (sequences.predictors, sequences.last)
        )
        candidates = sequences.candidates
        routing = sequences.routing
        if routing is not None:
            given = routing.given
            if given is not None:
                given = F.pad(given, (0, 0, 0, 0, *padding), value=OWN)[start : start + length]
            routing = Routing(given, routing.dtype)
        part = Sequences(
            ids,
            _SlicedAttention(sequences.packing, positions, num_tokens, self),
            sequences.predictors[of_tokens] - start,
            sequences.targets[of_tokens],
            sequences.last[of_rows] - start,
            candidates[of_tokens] if candidates is not None else None,
            routing,
        )
        totals = len(sequences.targets), len(sequences.last)
        return Slice(part, self, of_tokens, of_rows, *totals)


@dataclass(frozen=True, eq=False)
class Slice:
    """One rank's tokens of some sequences."""

    sequences: Sequences
    group: SequenceGroup
    of_tokens: Tensor  # (N,) int64: places of its predictions among those of all ranks
    of_rows: Tensor  # (M,) int64: rows whose last token is in the slice
    num_tokens: int
    num_rows: int

    def join_tokens(self, values: Tensor) -> Tensor:
        """Return the values of all response tokens from those of each rank: (N, …) -> (T, …).

        The gradient of a rank's values is that of its result: all ranks have the same loss.
        """
        return self._join(values, self.of_tokens, self.num_tokens)

    def join_routing(self, routing: Routing) -> None:
        """Set the choices of all tokens in `routing` from those of each rank."""
        part = self.sequences.routing
        assert part is not None
        choices = part.choices().int()  # NCCL does not add int16
        first = self.group.rank * len(choices)
        total = len(choices) * self.group.size
        places = torch.arange(first, first + len(choices), device=choices.device)
        routing.set_choices(self._join(choices, places, total), part.layers)

    def join_rows(self, values: Tensor) -> Tensor:
        """Return the values of all rows from those of each rank: (M, …) -> (B, …)."""
        return self._join(values, self.of_rows, self.num_rows)

    def _join(self, values: Tensor, places: Tensor, total: int) -> Tensor:
        apply: Any = _Join.apply
        return apply(values, places, total, self.group.group)


class _Join(torch.autograd.Function):
    """Values of all ranks in their places."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, places: Tensor, total: int, group: dist.ProcessGroup
    ) -> Tensor:
        """Map the values (N, …) at `places` (N,) of each rank to all values (total, …)."""
        ctx.save_for_backward(places)
        joined = values.new_zeros(total, *values.shape[1:])
        joined[places] = values
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Map the gradient (total, …) to that of the values (N, …)."""
        (places,) = ctx.saved_tensors
        return gradient[places], None, None, None


@dataclass(frozen=True, eq=False)
class _SlicedAttention:
    """Implements `TokenAttention` for a slice of the tokens of `packing`."""

    packing: Packed
    position_ids: Tensor  # (L,) int64
    num_tokens: int
    ranks: SequenceGroup

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """Attend to all tokens: (L, H, D), (L, K, D), (L, K, D) -> (L, H, D).

        KV heads are repeated where S does not divide their number.
        """
        size = self.ranks.size
        rank = self.ranks.rank
        own_heads = query.shape[1] // size
        times = lcm(key.shape[1], size) // key.shape[1]
        repeated = (x.repeat_interleave(times, 1) if times > 1 else x for x in (key, value))
        heads = [x.unflatten(1, (size, -1)) for x in (query, *repeated)]  # (L, S, heads / S, D)
        widths = [x.shape[2:].numel() for x in heads]
        parts = torch.cat([x.flatten(2) for x in heads], -1).transpose(0, 1)
        tokens = self._exchange(parts).flatten(0, 1)[: self.num_tokens]
        q, k, v = (
            part.unflatten(1, x.shape[2:])
            for part, x in zip(tokens.split(widths, -1), heads, strict=True)
        )
        if reach.sinks is not None:
            reach = reach._replace(sinks=reach.sinks[rank * own_heads : (rank + 1) * own_heads])
        out = self.packing.attend(layer, q, k, v, reach)  # (T, H / S, D)
        length = len(query)
        out = F.pad(out, (0, 0, 0, 0, 0, length * size - self.num_tokens))
        back = self._exchange(out.unflatten(0, (size, length)))  # (S, L, H / S, D)
        return back.transpose(0, 1).flatten(1, 2)

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """Refuse (L, C): models with mixers are not divided along the tokens."""
        del hidden, mixer
        raise InternalError("a mixer was called on a part of the tokens")

    def _exchange(self, parts: Tensor) -> Tensor:
        """Exchange parts (S, …) among the ranks."""
        one_each = [1] * self.ranks.size
        return exchange(parts, one_each, one_each, self.ranks.group)
