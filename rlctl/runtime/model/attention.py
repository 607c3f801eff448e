"""Attention without padding and masks, for any Hugging Face causal language model.

All other layers process tokens independently, so the model is called with one row (1, T) of
concatenated sequences. An object in the model's keyword arguments defines which tokens attend to
each other:

    use_rlctl_attention(model)
    packing = Packing.from_lengths(lengths, device)
    model(input_ids=ids[None], position_ids=packing.position_ids[None], packing=packing,
          use_cache=False)

`Packing` is a batch of complete sequences (training, scoring); the rollout engine `hf` has its own
classes for prefill and decoding with a KV cache. No mask is built: transformers builds none for an
attention implementation without a registered mask function.
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
# Sequences share a rectangle if the longest exceeds the shortest by at most this factor, or by
# this many tokens.
_GROWTH, _SLACK = 1.35, 16


class TokenAttention(Protocol):
    """Attention among the T tokens of one packed row: H query heads, K KV heads, D head size."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return softmax(scale · q kᵀ) v: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
        ...


@dataclass(frozen=True, eq=False)
class _Rectangle:
    """`rows` sequences of similar length, padded to `width` tokens."""

    rows: int
    width: int


@dataclass(frozen=True, eq=False)
class Packing:
    """B complete sequences in one packed row of T tokens, with causal attention within each.

    Attention runs on rectangles of sequences of similar length, S slots in total. They are padded
    on the right, which causal attention never reads, so they need no mask. Built once per
    micro-batch and used by every layer.
    """

    lengths: Tensor  # (B,) int64, on the CPU
    position_ids: Tensor  # (T,) int64: position of each token in its sequence
    rectangles: tuple[_Rectangle, ...]
    token_of_slot: Tensor  # (S,) int64: token in each slot; padding repeats the last token
    slot_of_token: Tensor  # (T,) int64

    @classmethod
    def from_lengths(cls, lengths: Tensor, device: torch.device | str) -> Packing:
        """Pack sequences of `lengths` (B,) tokens for tensors on `device`; lengths may be 0."""
        lengths = lengths.cpu()
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        order = lengths.argsort(stable=True)
        order = order[lengths[order] > 0]
        ascending = lengths[order].tolist()
        rectangles, tokens, slots, first = [], [], torch.empty_like(positions), 0
        num_slots = 0
        while first < len(ascending):
            shortest = ascending[first]
            end = first + sum(
                n <= max(shortest * _GROWTH, shortest + _SLACK) for n in ascending[first:]
            )
            rows, width = order[first:end], ascending[end - 1]
            column = torch.arange(width)
            last = lengths[rows, None] - 1
            token = starts[rows, None] + torch.minimum(column, last)  # (rows, width)
            real = column < lengths[rows, None]
            slots[token[real]] = num_slots + real.flatten().nonzero().squeeze(1)
            tokens.append(token.flatten())
            rectangles.append(_Rectangle(len(rows), width))
            first, num_slots = end, num_slots + len(rows) * width
        token_of_slot = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)
        return cls(
            lengths,
            positions.to(device),
            tuple(rectangles),
            token_of_slot.to(device),
            slots.to(device),
        )

    @cached_property
    def boundaries(self) -> Tensor:
        """Starts of the sequences (B,), then the end of the last, int32: for flash attention."""
        return F.pad(self.lengths.cumsum(0), (1, 0)).to(self.position_ids.device, torch.int32)

    @cached_property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return int(self.lengths.max())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend within sequences: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D), for any layer."""
        del layer
        if _has_varlen_kernel(query):
            return self._attend_varlen(query, key, value, scale)
        query, key, value = (x.index_select(0, self.token_of_slot) for x in (query, key, value))
        sizes = [rectangle.rows * rectangle.width for rectangle in self.rectangles]
        parts = []
        for rectangle, *qkv in zip(
            self.rectangles, query.split(sizes), key.split(sizes), value.split(sizes), strict=True
        ):
            shape = (rectangle.rows, rectangle.width)
            # (rows, heads, width, D)
            q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in qkv)
            part = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            parts.append(part.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, self.slot_of_token)

    def _attend_varlen(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Run flash attention: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D), half precision."""
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            *(query, key, value),
            *(self.boundaries, self.boundaries, self.longest, self.longest),
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(out, Tensor)  # a pair only if auxiliary outputs are requested
        return out


def _has_varlen_kernel(query: Tensor) -> bool:
    """Return True if flash attention supports `query` (T, H, D): see torch.nn.attention.varlen.

    It requires bfloat16 or float16, D ≤ 256, and an Ampere or later GPU.
    """
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
    """Compute attention for a layer of transformers: (1, H, T, D) -> (1, T, H, D)."""
    if (
        packing is None
        or attention_mask is not None
        or query.shape[0] != 1
        or key.shape[2] != query.shape[2]
    ):
        raise InternalError(
            f"attention {NAME!r} was called without `packing`, or with a mask, a cache or "
            f"{query.shape[0]} rows",
            hint="pass one row, packing=Packing.from_lengths(lengths, device) and use_cache=False",
        )
    unknown = [
        name
        for name in ("sliding_window", "softcap", "s_aux", "position_bias")
        if kwargs.get(name) is not None
    ]
    if unknown or kwargs.get("dropout"):
        raise ConfigError(
            f"the model's attention uses {unknown or 'dropout'}, which attention {NAME!r} does not "
            "support"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
    return packing.attend(layer, q, k, v, scale)[None], None


AttentionInterface.register(NAME, _attention)


def use_rlctl_attention(model: PreTrainedModel) -> None:
    """Switch `model` to this module's attention, in place. Weights are unchanged; idempotent.

    Raises:
        ConfigError: the model does not use plain causal attention over the entire context, or not
            transformers' attention interface.
    """
    config = model.config.get_text_config(decoder=True)
    where = f"the config of {type(model).__name__}"
    problems = []
    layer_types = getattr(config, "layer_types", None)
    unsupported = set(layer_types or ()) - {"full_attention"}
    if unsupported:
        problems.append(
            Problem(
                f"layers of type {sorted(unsupported)}; only full_attention is supported", where
            )
        )
    elif layer_types is None and getattr(config, "sliding_window", None) is not None:
        problems.append(
            Problem(
                f"sliding_window is {config.sliding_window}; only attention over the entire "
                "context is supported",
                where,
                "if your sequences are shorter than the window, set sliding_window to null in "
                "config.json",
            )
        )
    if getattr(config, "attention_dropout", 0.0):
        problems.append(
            Problem(
                f"attention_dropout is {config.attention_dropout}; log-probs of two passes would "
                "differ",
                where,
                "set attention_dropout to 0.0 in config.json",
            )
        )
    raise_problems([*problems, *_structural_problems(model)])
    model.set_attn_implementation(NAME)


def _structural_problems(model: PreTrainedModel) -> list[Problem]:
    """Return a problem if tokens of the model see more or less than the preceding tokens.

    `rlctl.runtime.model.probe` finds what this does not.
    """
    kind, where = model.config.model_type, f"the class {type(model).__name__}"
    hint = "use a model with plain causal attention, such as Llama, Qwen2, Qwen3 or Gemma"
    if model._is_stateful:
        text = f"{kind} has recurrent layers, whose state would leak from one packed row to another"
        return [Problem(text, where, hint)]
    if not model._can_set_attn_implementation():
        text = f"{kind} has an attention of its own (such as ALiBi), which cannot be replaced"
        return [Problem(text, where, hint)]
    if any(getattr(module, "is_causal", True) is False for module in model.get_decoder().modules()):
        text = f"{kind} is no causal language model: its tokens attend to later ones"
        return [Problem(text, where, hint)]
    return []
