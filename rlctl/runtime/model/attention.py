"""Attention without padding and without masks, for any Hugging Face causal language model.

Everything in a model but attention works on tokens, one by one. So the model is called with one row (1, T) of all sequences end to
end, and what stands between the tokens is said by one object that travels through the model's keyword arguments:

    use_rlctl_attention(model)
    packing = Packing.from_lengths(lengths, device)
    model(input_ids=ids[None], position_ids=packing.position_ids[None], packing=packing, use_cache=False)

`Packing` is a batch of whole sequences (training, scoring); the `hf` rollout engine brings its own for prefill and for decoding with
its cache. No mask is ever built: transformers builds none for an attention it knows no mask function of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rlctl.errors import ConfigError, InternalError, Problem, raise_problems

NAME = "rlctl"
_GROWTH, _SLACK = (
    1.35,
    16,
)  # sequences share a rectangle while the longest is at most this much longer than the shortest


class TokenAttention(Protocol):
    """How the tokens of one packed row attend to each other. T tokens, H query heads, K key-value heads, D head size."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(T, H, D), (T, K, D), (T, K, D) -> (T, H, D): softmax(scale · q kᵀ) v over what each token may see."""
        ...


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Sequences of about one length: `rows` of them, in a rectangle of `width` tokens."""

    rows: int
    width: int


@dataclass(frozen=True, eq=False)
class Packing:
    """Whole sequences end to end in one row of T tokens; each token sees those before it in its own sequence, and itself.

    Attention alone runs on rectangles, one for each bucket of similar lengths. They are padded on the right, where a causal token
    never looks, so they need no mask; S slots in all. Built once for a micro-batch and used by every layer.
    """

    lengths: Tensor  # (B,) int64, on the CPU
    position_ids: Tensor  # (T,) int64: each token's place in its sequence
    buckets: tuple[_Bucket, ...]
    token_of_slot: Tensor  # (S,) int64: the token that stands in a slot; padding repeats the sequence's last token
    slot_of_token: Tensor  # (T,) int64

    @classmethod
    def from_lengths(cls, lengths: Tensor, device: torch.device | str) -> Packing:
        """For sequences of `lengths` (B,) tokens, for tensors on `device`. A sequence of no tokens takes no place."""
        lengths = lengths.cpu()
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        order = lengths.argsort(stable=True)
        order = order[lengths[order] > 0]
        ascending = lengths[order].tolist()
        buckets, tokens, slots, first = [], [], torch.empty_like(positions), 0
        num_slots = 0
        while first < len(ascending):
            shortest = ascending[first]
            end = first + sum(
                n <= max(shortest * _GROWTH, shortest + _SLACK) for n in ascending[first:]
            )
            rows, width = order[first:end], ascending[end - 1]
            column = torch.arange(width)
            token = starts[rows, None] + torch.minimum(
                column, lengths[rows, None] - 1
            )  # (rows, width)
            real = column < lengths[rows, None]
            slots[token[real]] = num_slots + real.flatten().nonzero().squeeze(1)
            tokens.append(token.flatten())
            buckets.append(_Bucket(len(rows), width))
            first, num_slots = end, num_slots + len(rows) * width
        token_of_slot = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)
        return cls(
            lengths,
            positions.to(device),
            tuple(buckets),
            token_of_slot.to(device),
            slots.to(device),
        )

    @cached_property
    def boundaries(self) -> Tensor:
        """Where each sequence starts, and the end of the last, as flash attention wants it: (B + 1,) int32 on the device."""
        return F.pad(self.lengths.cumsum(0), (1, 0)).to(self.position_ids.device, torch.int32)

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(T, H, D), (T, K, D), (T, K, D) -> (T, H, D). The same for every layer."""
        del layer
        if _has_varlen_kernel(query):
            return self._attend_varlen(query, key, value, scale)
        query, key, value = (x.index_select(0, self.token_of_slot) for x in (query, key, value))
        sizes = [bucket.rows * bucket.width for bucket in self.buckets]
        parts = []
        for bucket, *qkv in zip(
            self.buckets, query.split(sizes), key.split(sizes), value.split(sizes), strict=True
        ):
            q, k, v = (
                x.unflatten(0, (bucket.rows, bucket.width)).transpose(1, 2) for x in qkv
            )  # (rows, heads, width, D)
            part = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            parts.append(part.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, self.slot_of_token)

    def _attend_varlen(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One flash-attention call over the ragged row. Reached on CUDA in half precision only."""
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            *(query, key, value),
            *(self.boundaries, self.boundaries, self.longest, self.longest),
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(out, Tensor)  # a pair only where auxiliary outputs are asked for
        return out


def _has_varlen_kernel(query: Tensor) -> bool:
    """Flash attention takes bfloat16 and float16 with a head size up to 256 on Ampere and later (torch.nn.attention.varlen)."""
    if (
        not query.is_cuda
        or query.dtype not in (torch.bfloat16, torch.float16)
        or query.shape[-1] > 256
    ):
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: TokenAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: (1, H, T, D) -> (1, T, H, D)."""
    if (
        packing is None
        or attention_mask is not None
        or query.shape[0] != 1
        or key.shape[2] != query.shape[2]
    ):
        raise InternalError(
            f"attention {NAME!r} was called without `packing`, or with a mask, a cache or {query.shape[0]} rows",
            hint="call the model with one row, `packing=Packing.from_lengths(lengths, device)` and use_cache=False",
        )
    unknown = [
        name
        for name in ("sliding_window", "softcap", "s_aux", "position_bias")
        if kwargs.get(name) is not None
    ]
    if unknown or kwargs.get("dropout"):
        raise ConfigError(
            f"the model's attention uses {unknown or 'dropout'}, which attention {NAME!r} does not have"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
    return packing.attend(layer, q, k, v, scale)[None], None


AttentionInterface.register(NAME, _attention)


def use_rlctl_attention(model: PreTrainedModel) -> None:
    """Make `model` call this module's attention. Its weights are not touched, and doing it twice is the same as once.

    Raises:
        ConfigError: the model's attention is not plain causal attention over the whole context.
    """
    config = model.config.get_text_config(decoder=True)
    where = f"the config of {type(model).__name__}"
    problems = []
    layers = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if layers:
        problems.append(
            Problem(f"layers of type {sorted(layers)}; only full_attention is supported", where)
        )
    elif (
        getattr(config, "layer_types", None) is None
        and getattr(config, "sliding_window", None) is not None
    ):
        hint = "set sliding_window to null in config.json if your sequences are shorter than the window"
        problems.append(
            Problem(
                f"sliding_window is {config.sliding_window}; only attention over the whole context is supported",
                where,
                hint,
            )
        )
    if getattr(config, "attention_dropout", 0.0):
        hint = "set attention_dropout to 0.0 in config.json"
        problems.append(
            Problem(
                f"attention_dropout is {config.attention_dropout}; log-probs of two passes would differ",
                where,
                hint,
            )
        )
    raise_problems(problems)
    model.set_attn_implementation(NAME)
