"""Layers of small Llama-like models as plain functions of fused weights, for the engine `hf`.

At a few rows a decoding step of a small model on a CPU is mostly the cost of calls: modules, hooks
and small operations. Here q, k and v are one product, gate and up another, and both include the
weights of the norm before them; biases and residuals are added by the products, and the rotary
embedding is read from a table. Results differ from those of the modules by rounding only. Where
oneDNN computes the products, zeros make their number of rows 16 or a multiple of 32, so that few
shapes occur.

Axes: T tokens, C hidden size, H query heads, K key-value heads, D head size, I intermediate size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from rlctl.runtime.base.ops import ceil_div
from rlctl.runtime.model.attention import TokenAttention, layer_window
from rlctl.runtime.model.kernels import Reach
from rlctl.runtime.model.onednn import Linear, is_faster, prepared, product
from rlctl.runtime.model.padded_rows import has_padded_rows
from rlctl.runtime.model.tower import image_processor
from rlctl.runtime.rollout.decoding import next_logits
from rlctl.runtime.rollout.requests import Request

if TYPE_CHECKING:
    from rlctl.runtime.model.vision import SeenPrompt, Vision

# Largest copies of weights in bytes. In larger models products take most of the time.
_MAX_BYTES = 2**27
# transformers' model types and the prefix of their classes.
_FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# Rotary embeddings that depend on the position only, not on the longest of a pass.
_FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}
_FIRST_POSITIONS = 1024
_FEW = 8  # tokens that are not faster with oneDNN
_STEP = 32
# The modules of these models: those of transformers, and others.
_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
_PLAIN = (nn.Linear, Linear, nn.Embedding, nn.ModuleList, SiLUActivation)


class _Product(NamedTuple):
    """Product of inputs with the weights of one or several linear layers."""

    weight: Tensor  # (in, out)
    bias: Tensor | None  # (out,)
    prepared: Tensor | None  # the weight for oneDNN, where that is faster

    @classmethod
    def of(cls, layers: Sequence[nn.Linear], norm: Tensor | None = None) -> _Product:
        """Join layers with the same input, which they multiply by `norm` (in,)."""
        biases = [each.bias.detach() for each in layers if each.bias is not None]
        weight = torch.cat([each.weight.detach() for each in layers])  # (out, in)
        if norm is not None:
            weight *= norm
        return cls(
            weight.t().contiguous(),
            torch.cat(biases) if biases else None,
            prepared(weight, _FEW) if is_faster() else None,
        )

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Return x W + b + a: (T, in), (T, out) -> (T, out)."""
        weight, bias, for_onednn = self
        if for_onednn is not None and len(x) > _FEW:
            return product(x, for_onednn, bias, add)
        if add is not None:
            return torch.addmm(add if bias is None else add + bias, x, weight)
        if bias is not None:
            return torch.addmm(bias, x, weight)
        return torch.mm(x, weight)


class _Layer(NamedTuple):
    """Weights of a decoder layer; products with their numbers of inputs and outputs."""

    reach: Reach
    qkv: _Product  # C, (H + 2K)·D
    head_norm: Tensor | None  # (H + K, D): of queries and keys
    out: _Product  # H·D, C
    gate_up: _Product  # C, 2·I
    down: _Product  # I, C


class FusedModel:
    """Forward pass of a causal language model in float32 on a CPU, without gradients.

    The weights of linear layers are copies of those of `model`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        config = model.config
        self._eps = torch.tensor(config.rms_norm_eps)
        attention = self.model.model.layers[0].self_attn
        self.head_size: int = attention.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_kv: int = config.num_key_value_heads
        self._layers = [self._layer(i, each) for i, each in enumerate(self.model.model.layers)]
        self._head = _Product.of([self.model.lm_head], self.model.model.norm.weight)
        self._rotary = torch.empty(2, 0, 1, self.head_size)  # cos and sin by position

    @staticmethod
    def is_exact_for(model: PreTrainedModel) -> bool:
        """Return True if the passes of `model` are exactly those of this class.

        Its modules must be those of transformers, without adapters, hooks and replaced methods.
        """
        config = model.config
        family = config.model_type
        prefix = _FAMILIES.get(family)
        if prefix is None or has_padded_rows(model) or config.hidden_act != "silu":
            return False
        if config.rope_parameters.get("rope_type") not in _FIXED_ROTARY:
            return False
        parameters = list(model.parameters())
        if any(each.dtype != torch.float32 or each.device.type != "cpu" for each in parameters):
            return False
        if 4 * sum(each.numel() for each in parameters) > _MAX_BYTES:
            return False
        path = f"transformers.models.{family}.modeling_{family}"
        known = {(path, f"{prefix}{part}.forward") for part in _PARTS}
        for module in model.modules():
            forward = type(module).forward
            is_known = (forward.__module__, forward.__qualname__) in known
            if not (is_known or type(module) in _PLAIN) or "forward" in vars(module):
                return False
            hooks = module._forward_hooks or module._forward_pre_hooks
            if hooks and not isinstance(module, nn.Embedding):  # which is called as a module
                return False
        return True

    def logits(
        self, tokens: Tensor, positions: Tensor, attention: TokenAttention, keep: Tensor | int
    ) -> Tensor:
        """Return the logits (N, V) of the tokens (T,) at indices `keep` (N,); 0 keeps all T."""
        model = self.model
        count = len(tokens)
        padding = _num_rows(count) - count
        hidden = model.model.embed_tokens(tokens)  # (T, C)
        if padding:
            hidden, positions = F.pad(hidden, (0, 0, 0, padding)), F.pad(positions, (0, padding))
        cos, sin = self._embedding(positions)
        rotated = (self.num_heads + self.num_kv) * self.head_size
        for number, layer in enumerate(self._layers):
            x = layer.qkv(self._norm(hidden))
            value = x[:, rotated:].unflatten(1, (self.num_kv, -1))  # (T, K, D)
            x = x[:, :rotated].unflatten(1, (-1, self.head_size))  # (T, H + K, D)
            if layer.head_norm is not None:
                x = self._norm(x) * layer.head_norm
            x = (x * cos).addcmul_(x.roll(self.head_size // 2, 2), sin)
            query, key = x[:count, : self.num_heads], x[:count, self.num_heads :]
            x = attention.attend(number, query, key, value[:count], layer.reach).flatten(1)
            if padding:
                x = F.pad(x, (0, 0, 0, padding))
            hidden = layer.out(x, hidden)
            gate, up = layer.gate_up(self._norm(hidden)).chunk(2, 1)
            hidden = layer.down(F.silu(gate).mul_(up), hidden)
        if isinstance(keep, Tensor):
            hidden = hidden[keep]
        logits = self._head(self._norm(hidden))
        return logits if isinstance(keep, Tensor) else logits[:count]

    def _norm(self, x: Tensor) -> Tensor:
        """Return x divided by its root mean square over the last axis, (..., C) -> (..., C)."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()

    def _embedding(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (T, 1, D) of the rotary embedding; sin has the sign of its half."""
        longest = int(positions.max())
        if longest >= self._rotary.shape[1]:
            size = max(_FIRST_POSITIONS, 1 << longest.bit_length())
            every = torch.arange(size)[None]
            cos, sin = self.model.model.rotary_emb(self._rotary, every)  # (1, size, D)
            half = self.head_size // 2
            sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
            self._rotary = torch.cat([cos, sin])[:, :, None]
        cos, sin = self._rotary[:, positions]
        return cos, sin

    def _layer(self, number: int, layer: Any) -> _Layer:
        attention = layer.self_attn
        mlp = layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        head_norm = None
        if hasattr(attention, "q_norm"):
            of_queries = attention.q_norm.weight.detach().expand(self.num_heads, -1)
            of_keys = attention.k_norm.weight.detach().expand(self.num_kv, -1)
            head_norm = torch.cat([of_queries, of_keys])
        return _Layer(
            Reach(attention.scaling, layer_window(self.model.config, number)),
            _Product.of(qkv, layer.input_layernorm.weight),
            head_norm,
            _Product.of([attention.o_proj]),
            _Product.of([mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm.weight),
            _Product.of([mlp.down_proj]),
        )


def _num_rows(num_tokens: int) -> int:
    """Return the number of rows of the products for as many tokens."""
    if not is_faster() or num_tokens <= _FEW:
        return num_tokens
    if num_tokens <= 2 * _FEW:
        return 2 * _FEW
    return ceil_div(num_tokens, _STEP) * _STEP


class Passes:
    """Forward passes of the engine: fused where that is the same, or else by the modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._fused: FusedModel | None = None

    @property
    def is_fused(self) -> bool:
        """True if the modules of the model are not called, except its embedding and head."""
        return self._fused is not None

    def refresh(self) -> None:
        """Take over the weights of the model, which do not change until the next call."""
        self._fused = FusedModel(self.model) if FusedModel.is_exact_for(self.model) else None

    def seen(self, request: Request) -> SeenPrompt | None:
        """Return the context of a request with its images; None for a model without a tower."""
        if image_processor(self.model) is None and not request.images:
            return None
        from rlctl.runtime.model.vision import SeenPrompt

        return SeenPrompt.of(self.model, request.context_ids, request.images)

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: TokenAttention,
        keep: Tensor | int = 0,
        vision: Vision | None = None,
    ) -> Tensor:
        """Return the logits (N, V) of the tokens (T,) at indices `keep` (N,): see `next_logits`."""
        if self._fused is None:
            return next_logits(self.model, tokens, positions, attention, keep, vision)
        return self._fused.logits(tokens, positions, attention, keep)
