"""Attention without padding and masks, for any Hugging Face causal language model.

All other layers process tokens independently, so the model is called with one row (1, T) of
concatenated sequences. An object in the model's keyword arguments defines which tokens attend to
each other:

    use_rlctl_attention(model)
    packing = Packing.from_lengths(lengths, device)
    model(input_ids=ids[None], position_ids=packing.position_ids[None], packing=packing,
          use_cache=False)

`Packing` is a batch of complete sequences (training, scoring); the rollout engine `hf` has other
classes for prefill and decoding with a KV cache. Layers may have sliding windows and sinks
(`rlctl.runtime.model.kernels`). No mask of all tokens is built: transformers builds none for an
attention implementation without a registered mask function.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rlctl.errors import ConfigError, InternalError
from rlctl.runtime.base.ops import to_device
from rlctl.runtime.model.kernels import Reach, attend_dense, causal_mask, choose_kernel
from rlctl.runtime.model.padded_rows import (
    decoder_of,
    has_padded_rows,
    use_own_attention,
    use_padded_rows,
    warn_of_padding,
)
from rlctl.runtime.model.rectangles import Rectangles
from rlctl.runtime.model.state_layers import argument_for_states, has_mixers

if TYPE_CHECKING:
    from rlctl.runtime.model.gpu_kernels import TokenMap
    from rlctl.runtime.model.mixers import Mixer

NAME = "rlctl"
_SLIDING = "sliding_attention"  # transformers' type of layers with a window
_CAUSAL = "use a causal model, such as Llama, Qwen3.5 or Gemma"
_RANDOM = ("reformer",)
# Types without attention, or with attention to the whole context.
_OTHER_TYPES = {
    "full_attention",
    "attention",
    "linear_attention",
    "conv",
    "mamba",
    "mamba2",
    "hybrid",
    "moe",
    "mlp",
}


class TokenAttention(Protocol):
    """Attention among the T tokens of one packed row: H query heads, K KV heads, D head size."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """Return softmax(scale · q kᵀ) v: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
        ...

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """Return the outputs of a mixer, which reads each sequence from its start: (T, C)."""
        ...


@dataclass(frozen=True, eq=False)
class Packing:
    """B complete sequences in one packed row of T tokens, with causal attention within each.

    Built once per micro-batch and used by every layer.
    """

    lengths: Tensor  # (B,) int64, on the CPU
    position_ids: Tensor  # (T,) int64: position of each token in its sequence

    @classmethod
    def from_lengths(cls, lengths: Tensor, device: torch.device | str) -> Packing:
        """Pack sequences of `lengths` (B,) tokens for tensors on `device`; lengths may be 0."""
        lengths = lengths.cpu()
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        return cls(lengths, to_device(positions, device))

    @cached_property
    def rectangles(self) -> Rectangles:
        """The sequences in rectangles, for dense attention and mixers: see `Rectangles`."""
        return Rectangles.from_lengths(self.lengths, self.position_ids.device)

    @cached_property
    def token_map(self) -> TokenMap:
        """Sequence of each token, for FlexAttention."""
        from rlctl.runtime.model.gpu_kernels import TokenMap

        numbers = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        sequence = to_device(numbers, self.position_ids.device)
        return TokenMap(sequence, torch.full_like(sequence, -1), self.position_ids)

    @cached_property
    def boundaries(self) -> Tensor:
        """Starts of the sequences (B,), then the end of the last, int32: for flash attention."""
        ends = F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)
        return to_device(ends, self.position_ids.device)

    @cached_property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return int(self.lengths.max())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """Attend within sequences: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D), for any layer."""
        del layer
        kernel = choose_kernel(query, reach)
        if kernel == "varlen":
            from rlctl.runtime.model.gpu_kernels import attend_varlen

            ends = (self.boundaries, self.boundaries)
            longest = (self.longest, self.longest)
            return attend_varlen(query, key, value, reach, ends, longest)
        if kernel == "flex":
            return self.token_map.attend(query, key, value, reach)
        return self.attend_rectangles(query, key, value, reach)

    def attend_rectangles(self, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """Attend by `attend_dense`: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
        shapes, tokens, slots = self.rectangles
        query, key, value = (x.index_select(0, tokens) for x in (query, key, value))
        sizes = [rectangle.rows * rectangle.width for rectangle in shapes]
        parts = []
        for rectangle, *qkv in zip(
            shapes, query.split(sizes), key.split(sizes), value.split(sizes), strict=True
        ):
            shape = (rectangle.rows, rectangle.width)
            # (rows, heads, width, D)
            q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in qkv)
            visible = None
            if reach.window is not None and reach.window < rectangle.width:
                visible = causal_mask(rectangle.width, rectangle.width, reach.window, q.device)[
                    None, None
                ]
            part = attend_dense(q, k, v, reach, visible)
            parts.append(part.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, slots)

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """See `TokenAttention`: (T, ...) -> (T, C)."""
        if mixer.packed is not None and int(self.lengths.min()) > 0:
            return mixer.packed(hidden, self.boundaries, self.token_map.prompt)
        rectangles = self.rectangles
        if mixer.is_sharded:
            device = self.position_ids.device
            rectangles = Rectangles.from_lengths(self.lengths, device, only_one=True)
        shapes, tokens, slots = rectangles
        sizes = [rectangle.rows * rectangle.width for rectangle in shapes]
        parts = hidden.index_select(0, tokens).split(sizes)
        mixed = [
            mixer(part.unflatten(0, (rectangle.rows, rectangle.width))).flatten(0, 1)
            for rectangle, part in zip(shapes, parts, strict=True)
        ]
        return torch.cat(mixed).index_select(0, slots)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: TokenAttention | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
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
    if kwargs.get("position_bias") is not None:
        raise ConfigError(f"attention {NAME!r} does not support a position_bias")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)
    config = getattr(module, "config", None)
    expected = None if config is None else layer_window(config, layer)
    if sliding_window != expected:
        raise ConfigError(
            f"layer {layer} attends to a window of {sliding_window} tokens, and config.json says "
            f"{expected}",
            hint="set layer_types and sliding_window in config.json to those of the model",
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (T, heads, D) views
    reach = Reach(scale, sliding_window, s_aux, kwargs.get("softcap"))
    return packing.attend(layer, q, k, v, reach)[None], None


def layer_window(config: Any, layer: int) -> int | None:
    """Return the sliding window of a layer in tokens; None for the entire context."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != _SLIDING:
        return None
    return getattr(config, "sliding_window", None)


def head_size(config: Any) -> int | None:
    """Return the head size that a decoder's config gives, the largest of its layers."""
    try:
        return getattr(config, "head_dim", None)
    except RuntimeError:  # transformers refuses an attribute that differs between layers
        return max(layer.head_dim for layer in config.per_layer_config)


AttentionInterface.register(NAME, _attention)


def _set_attention(model: PreTrainedModel) -> None:
    """Switch the language model of `model` to this module's attention, and towers to theirs."""
    config = model.config
    text = config.get_text_config(decoder=True)
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    if not any(part is text for part in parts.values()):
        model.set_attn_implementation(NAME)
        return
    other = "sdpa" if model._supports_sdpa else "eager"
    chosen = {name: NAME if part is text else other for name, part in parts.items() if part}
    model.set_attn_implementation({"": NAME, **chosen})


def leave_out_of_graphs() -> None:
    """Make compiled layers call the attention as it is."""
    AttentionInterface.register(NAME, torch.compiler.disable(_attention))


def use_rlctl_attention(model: PreTrainedModel) -> None:
    """Switch `model` to this module's attention, in place. Weights are unchanged; idempotent.

    A model that cannot use it computes padded rows: see `rlctl.runtime.model.padded_rows`.

    Raises:
        ConfigError: the model is not causal.
    """
    if has_padded_rows(model):
        use_own_attention(model)
        return
    kind = model.config.model_type
    config = model.config.get_text_config(decoder=True)
    is_causal = all(getattr(part, "is_causal", True) for part in decoder_of(model).modules())
    if kind in _RANDOM:
        raise ConfigError(f"the attention of {kind} hashes tokens at random", hint=_CAUSAL)
    if not is_causal and not getattr(model.config, "is_decoder", False):
        raise ConfigError(
            f"{kind} is no causal language model: its tokens attend to later ones",
            where=f"the class {type(model).__name__}",
            hint=_CAUSAL,
        )
    if any(argument_for_states(module) for module in decoder_of(model).modules()):
        from rlctl.runtime.model.mixers import install_mixers

        install_mixers(model)
    others = set(getattr(config, "layer_types", None) or ()) - _OTHER_TYPES - {_SLIDING}
    reason = None
    if not is_causal:
        reason = "it has attention to an encoder"
    elif others:
        reason = f"it has layers of type {', '.join(sorted(others))}"
    elif model._is_stateful and not has_mixers(model):
        reason = "its layers keep states between tokens"
    elif not model._can_set_attn_implementation():
        reason = "it has a special attention, such as ALiBi"
    if reason is None:
        _set_attention(model)
    else:
        use_padded_rows(model)
        warn_of_padding(model, reason)
