"""Sizes of a model, from its config alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes import schema
from rlctl.runtime.base.ops import ceil_div
from rlctl.runtime.model.adapter_names import adapt
from rlctl.runtime.model.attention import head_size
from rlctl.runtime.model.costs import Costs
from rlctl.runtime.model.load import Kind, build_empty, load_config

# Names of the width of the feed-forward layer, by architecture.
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "d_ff")
# Names of the number of experts of a token.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


class UnknownSizeError(RlctlError):
    """The size of a model is unknown before it is loaded."""


@dataclass(frozen=True)
class ModelSize:
    """Layer sizes and parameter counts of a decoder."""

    num_parameters: int
    num_trained: int  # fewer than all with LoRA
    largest_block: int  # parameters of the largest block; FSDP gathers one at a time
    outside_blocks: int  # parameters of no block: embeddings, the last norm, the head
    largest_tensor: int  # trained parameters of the largest weight
    num_layers: int
    hidden: int
    intermediate: int
    query: int  # heads × head size
    key_value: int
    vocab: int
    cached: int  # numbers of a token in the cache of the engine hf, in all layers
    latent: int  # numbers of a token in vLLM's cache of latent attention; 0: as in `cached`
    states: int  # numbers of a row in the cache, of layers with states

    @classmethod
    def from_config(cls, model: schema.Model, kind: Kind) -> Self:
        """Count the parameters of a model built on torch's meta device, value head included.

        Raises `ConfigError` where transformers cannot build the model, and `UnknownSizeError`
        where the model's code does not run on the meta device.
        """
        config = load_config(model, kind)
        built = build_on_meta(config, model, kind)
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", None) or 1
        head_dim = head_size(text) or text.hidden_size // heads
        key_value = (getattr(text, "num_key_value_heads", None) or heads) * head_dim
        costs = None
        if kind == "policy":
            costs = Costs.from_config(config, lambda: build_on_meta(config, model, kind))
        if costs is None:
            num_cached = text.num_hidden_layers
            cached = 2 * num_cached * key_value
            states = 0
        else:
            num_cached = len(costs.attention)
            cached = costs.cached
            states = costs.states
        with torch.device("meta"):
            adapt(built.base_model if kind == "new_classifier" else built, model, 0)
        names = set(built._no_split_modules or ())
        blocks = [_count(module) for module in built.modules() if type(module).__name__ in names]
        head = text.hidden_size + 1 if kind == "backbone" else 0
        total = _count(built) + head
        return cls(
            num_parameters=total,
            num_trained=sum(
                parameter.numel() for parameter in built.parameters() if parameter.requires_grad
            )
            + head,
            largest_block=max(blocks, default=total),
            outside_blocks=max(0, total - sum(blocks)),  # some name a block and parts of it
            largest_tensor=max(
                (parameter.numel() for parameter in built.parameters() if parameter.requires_grad),
                default=head,
            ),
            num_layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=_intermediate(text),
            query=heads * head_dim,
            key_value=key_value,
            vocab=text.vocab_size,
            cached=cached,
            latent=_latent(text, num_cached),
            states=states,
        )

    def split(self, ranks: int) -> Self:
        """Return the sizes on one of `ranks` that split the layers; norms count as split, too."""
        names = (
            *("num_parameters", "num_trained", "largest_block", "outside_blocks"),
            *("intermediate", "query", "key_value", "vocab"),
        )
        return replace(self, **{name: ceil_div(getattr(self, name), ranks) for name in names})

    def stage(self, stages: int) -> Self:
        """Return the sizes of the largest of `stages` with some layers each.

        That is the first, with the embedding, or the last, with the head.
        """
        layers = ceil_div(self.num_layers, stages)
        ends = self.outside_blocks
        if stages > 1:
            ends = min(ends, (self.vocab + 1) * self.hidden)
        blocks = (self.num_parameters - self.outside_blocks) * layers
        num_parameters = ceil_div(blocks, self.num_layers) + ends
        return replace(
            self,
            num_parameters=num_parameters,
            num_trained=ceil_div(self.num_trained * num_parameters, self.num_parameters),
            outside_blocks=ends,
            num_layers=layers,
        )

    @property
    def activations_per_token(self) -> int:
        """Numbers per token that one layer stores for the backward pass.

        6·hidden (residual stream, norms), query, keys, values and their output, and 4·intermediate
        (gate, its activation, up, their product).
        """
        return 6 * self.hidden + 2 * self.query + 2 * self.key_value + 4 * self.intermediate


def _intermediate(text: PretrainedConfig) -> int:
    """Return the channels of the feed-forward layer, or those of the experts of a token."""
    given = (size for name in _INTERMEDIATE if (size := getattr(text, name, None)))
    dense = next(given, 4 * text.hidden_size)
    top_k = next((k for name in _TOP_K if (k := getattr(text, name, None))), 0)
    return max(dense, top_k * (getattr(text, "moe_intermediate_size", None) or dense))


def _latent(text: PretrainedConfig, num_layers: int) -> int:
    """Return the numbers of a token in a cache of latent attention (DeepSeek-V2); 0 without."""
    rank = getattr(text, "kv_lora_rank", None)
    if not rank:
        return 0
    rotary = getattr(text, "qk_rope_head_dim", None) or 0
    return num_layers * (rank + rotary)


def build_on_meta(config: PretrainedConfig, model: schema.Model, kind: Kind) -> PreTrainedModel:
    """Build a model without data. Raises `ConfigError` and `UnknownSizeError`: see `ModelSize`."""
    try:
        return build_empty(config, model.trust_remote_code, kind)
    except (ValueError, ImportError, LookupError, ArithmeticError, AssertionError) as error:
        raise ConfigError(
            f"the model {model.path!r} cannot be built: {_first_line(error)}"
        ) from error
    except (RuntimeError, TypeError, AttributeError) as error:
        # The model's code computes with values, which the meta device does not have.
        raise UnknownSizeError(
            f"the memory of {model.path!r} is unknown before it is loaded: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, KeyError):
        return f"none of the known names: {first}"
    return first


def _count(module: nn.Module) -> int:
    """Return the number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
