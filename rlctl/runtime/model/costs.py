"""Operations and cache of a decoder, for any model of packed rows: measured without data.

A pass on torch's meta device counts the operations of all layers: those of a mixture with the
experts that a token uses, those of layers with states as transformers computes them. Attention is
not among them, because its operations grow with the length of a row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig, PreTrainedModel

from rlctl.errors import RlctlError
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.kernels import Reach
from rlctl.runtime.model.load import class_for
from rlctl.runtime.model.padded_rows import has_padded_rows

if TYPE_CHECKING:
    from rlctl.runtime.model.mixers import Mixer

_TOKENS = 64  # a chunk of gated delta nets
# Errors of a model's code, which may need data.
_OWN_CODE = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, AssertionError)
_KNOWN: dict[tuple[str, bool], Costs | None] = {}  # by config, and if its builder was given


class _Attention(NamedTuple):
    """Sizes of the attention of a layer."""

    num_heads: int
    head_sizes: int  # of a key and a value
    cached: int  # numbers of a token: keys and values of all KV heads
    window: int | None


@dataclass(frozen=True)
class Costs:
    """Operations of a token and numbers in the cache of a row."""

    operations: float  # of a token, forward, in all layers and the head
    embedding: int  # numbers of the embedding of tokens
    attention: tuple[_Attention, ...]  # of the layers that have it
    states: int  # numbers of a row, of recurrences and convolutions

    @classmethod
    def from_config(
        cls, config: PretrainedConfig, build: Callable[[], PreTrainedModel] | None = None
    ) -> Costs | None:
        """Measure a policy of `config`, once per process: see `_measure`.

        `build` returns one on the meta device, from code of the model if need be.
        """
        key = json.dumps(config.to_dict(), sort_keys=True, default=str), build is not None
        if key not in _KNOWN:
            try:
                with torch.device("meta"):
                    hf = build() if build else class_for("policy", config).from_config(config)
                _KNOWN[key] = cls._measure(hf.eval())
            except (ImportError, *_OWN_CODE):
                _KNOWN[key] = None  # its code is not trusted here
        return _KNOWN[key]

    @classmethod
    def _measure(cls, hf: PreTrainedModel) -> Self | None:
        """Measure a model on the meta device, which it changes.

        Returns None for one that computes padded rows, or whose code needs data.
        """
        meter = _Meter()
        with torch.device("meta"), torch.no_grad():
            ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
            places = torch.arange(_TOKENS)[None]
            try:
                use_rlctl_attention(hf)
                if has_padded_rows(hf):
                    return None
                if hf._can_set_experts_implementation():
                    hf.set_experts_implementation("batched_mm")  # computes the chosen experts
                with FlopCounterMode(display=False) as counter:
                    hf(input_ids=ids, position_ids=places, packing=meter, use_cache=False)
                embedding: Any = hf.get_input_embeddings()
            except (RlctlError, *_OWN_CODE):
                return None
        operations = counter.get_total_flops() / _TOKENS
        return cls(operations, embedding.weight.numel(), tuple(meter.attention), meter.states)

    @property
    def cached(self) -> int:
        """Numbers that the cache holds of a token."""
        return sum(layer.cached for layer in self.attention)

    def training_flops(self, lengths: Iterable[int]) -> float:
        """Return the FLOPs of forward and backward passes over rows of `lengths` tokens.

        Three times those of the forward pass: of the layers, with the embedding as a product of
        matrices, as in verl, and len² · heads · (key + value size) of causal attention, half of
        all pairs. A layer with a window w < len has 2·w·len − w² in place of len². Recomputed
        activations do not count, because MFU measures useful work.
        """
        lens = list(lengths)
        pairs = sum(
            times
            * layer.num_heads
            * layer.head_sizes
            * (n * n if window is None or n <= window else (2 * n - window) * window)
            for layer, times in Counter(self.attention).items()
            for window in (layer.window,)
            for n in lens
        )
        return float(3 * (self.operations + 2 * self.embedding) * sum(lens) + 3 * pairs)


@dataclass
class _Meter:
    """Implements `TokenAttention` for a row on the meta device: notes the sizes of layers."""

    attention: list[_Attention] = field(default_factory=list)
    states: int = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        del layer, key
        tokens, heads, size = query.shape
        _, kv_heads, value_size = value.shape
        sizes = size + value_size
        self.attention.append(_Attention(heads, sizes, kv_heads * sizes, reach.window))
        return query.new_empty(tokens, heads, value_size)

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        states = mixer.new_states()
        mixed = mixer(hidden[None], states)[0]
        for layer in states.layers:
            for name in ("conv_states", "recurrent_states"):
                parts: dict[int, Tensor | None] = getattr(layer, name, None) or {}
                self.states += sum(part.numel() for part in parts.values() if part is not None)
        return mixed
