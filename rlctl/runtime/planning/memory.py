"""Memory of one role on one device, estimated from the model's config; no weights are read.

Parameters, gradients and moments are exact. Activations and gathered blocks are estimates for a
decoder with a gated feed-forward layer and an attention that stores no scores. Fragmentation, the
framework's own memory and communication buffers are not included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes import schema
from rlctl.runtime.model.causal_lm import MAX_LOGITS
from rlctl.runtime.model.load import Kind, auto_class, with_labels
from rlctl.runtime.model.lora import add_adapters
from rlctl.runtime.ops import ceil_div
from rlctl.storage import local

# Names of the width of the feed-forward layer, by architecture.
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "d_ff")


class UnknownSizeError(RlctlError):
    """The size of a model is unknown before it is loaded."""


@dataclass(frozen=True)
class ModelSize:
    """Layer sizes and parameter counts of a decoder."""

    num_parameters: int
    num_trained: int  # fewer than all with LoRA
    largest_block: int  # parameters of the largest block; FSDP gathers one at a time
    outside_blocks: int  # parameters of no block: embeddings, the last norm, the head
    num_layers: int
    hidden: int
    intermediate: int
    query: int  # heads × head size
    key_value: int
    vocab: int

    @classmethod
    def from_config(cls, model: schema.Model, kind: Kind) -> Self:
        """Count the parameters of a model built on torch's meta device, value head included.

        Raises `ConfigError` where transformers cannot build the model, and `UnknownSizeError`
        where the model's code does not run on the meta device.
        """
        config = AutoConfig.from_pretrained(
            local(model.path),
            trust_remote_code=model.trust_remote_code,
            **with_labels(model.override_config, kind),
        )
        built, text = build_on_meta(config, model, kind), config.get_text_config()
        with torch.device("meta"):
            add_adapters(built.base_model if kind == "new_classifier" else built, model, 0)
        names = set(built._no_split_modules or ())
        blocks = [_count(module) for module in built.modules() if type(module).__name__ in names]
        head = text.hidden_size + 1 if kind == "backbone" else 0
        total = _count(built) + head
        heads = getattr(text, "num_attention_heads", None) or 1
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(
            num_parameters=total,
            num_trained=sum(
                parameter.numel() for parameter in built.parameters() if parameter.requires_grad
            )
            + head,
            largest_block=max(blocks, default=total),
            outside_blocks=max(0, total - sum(blocks)),  # some name a block and parts of it
            num_layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=next(
                (size for name in _INTERMEDIATE if (size := getattr(text, name, None))),
                4 * text.hidden_size,
            ),
            query=heads * head_dim,
            key_value=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
            vocab=text.vocab_size,
        )

    def split(self, ranks: int) -> Self:
        """Return the sizes on one of `ranks` that split the layers; norms count as split, too."""
        names = (
            *("num_parameters", "num_trained", "largest_block", "outside_blocks"),
            *("intermediate", "query", "key_value", "vocab"),
        )
        return replace(self, **{name: ceil_div(getattr(self, name), ranks) for name in names})

    @property
    def activations_per_token(self) -> int:
        """Numbers per token that one layer stores for the backward pass.

        6·hidden (residual stream, norms), query, keys, values and their output, and 4·intermediate
        (gate, its activation, up, their product).
        """
        return 6 * self.hidden + 2 * self.query + 2 * self.key_value + 4 * self.intermediate


@dataclass(frozen=True)
class Storage:
    """Storage of a model on the devices."""

    master: int  # bytes per stored parameter
    compute: int  # bytes per parameter or activation in the forward pass
    shards: int  # ranks that one copy of the parameters is divided over
    wrapped: bool  # by FSDP, which gathers blocks before use
    reshard: bool  # free gathered blocks after the forward pass
    offload: bool  # keep parameters and moments in host memory
    tensor: int = 1  # ranks that split each layer

    @classmethod
    def unsharded(cls, dtype: torch.dtype) -> Self:
        """Return the storage of a complete copy on every device, in the type of computation."""
        size = dtype.itemsize
        return cls(size, size, shards=1, wrapped=False, reshard=False, offload=False)

    @classmethod
    def from_config(
        cls,
        master: torch.dtype,
        compute: torch.dtype,
        ranks: int,
        fsdp: schema.FSDP,
    ) -> Self:
        """Return the storage of a model that FSDP shards over `ranks` as configured."""
        wrapped = ranks > 1 or master != compute
        tensor = fsdp.tensor_model_parallel_size
        rest = max(1, ranks // tensor)
        shards = rest if fsdp.fsdp_size == -1 else min(rest, fsdp.fsdp_size)
        return cls(
            master.itemsize,
            compute.itemsize,
            shards,
            wrapped,
            fsdp.reshard_after_forward,
            wrapped and fsdp.param_offload,
            tensor,
        )


@dataclass(frozen=True)
class Work:
    """Largest amount of work of a role at a time, on one rank."""

    tokens: int  # of a micro-batch; 0 without forward passes
    learns: bool
    checkpointing: bool
    has_logits: bool
    kv_tokens: int  # in the engine's cache; 0 without an engine
    averages: bool = False  # keeps a moving average of the trained parameters


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of a role on one device: held all the time before `gradients`, temporary from there."""

    role: str
    num_parameters: int
    num_trained: int
    parameters: int
    moments: int
    gathered: int
    engine_copy: int
    gradients: int
    activations: int
    logits: int
    kv_cache: int

    @property
    def held(self) -> int:
        """Bytes held all the time."""
        return self.parameters + self.moments + self.gathered + self.engine_copy

    @property
    def passing(self) -> int:
        """Temporary bytes: the larger of generation and learning, which take turns."""
        return max(self.kv_cache, self.gradients + self.activations + self.logits)

    @property
    def peak(self) -> int:
        """Largest number of bytes at any time."""
        return self.held + self.passing


def role_memory(role: str, size: ModelSize, storage: Storage, work: Work) -> RoleMemory:
    """Estimate the memory of one role.

    With checkpointing each layer stores its input, and one layer at a time all activations.
    """
    part = size.split(storage.tensor)
    own, trained = (
        0 if storage.offload else ceil_div(number, storage.shards) * storage.master
        for number in (part.num_parameters, part.num_trained)
    )
    has_own_engine = storage.wrapped or size.num_trained < size.num_parameters
    in_use = (
        2 * part.largest_block + part.outside_blocks if storage.reshard else part.num_parameters
    )
    layer = work.tokens * part.activations_per_token * storage.compute
    if not work.learns:
        activations = layer
    elif work.checkpointing:
        activations = size.num_layers * work.tokens * size.hidden * storage.compute + layer
    else:
        activations = size.num_layers * layer
    rows = min(work.tokens, max(1, MAX_LOGITS // part.vocab)) if work.has_logits else 0
    return RoleMemory(
        role=role,
        num_parameters=size.num_parameters,
        num_trained=size.num_trained,
        parameters=own + (trained if work.averages else 0),
        moments=2 * trained if work.learns else 0,
        gathered=min(in_use, part.num_parameters) * storage.compute if storage.wrapped else 0,
        engine_copy=size.num_parameters * storage.compute
        if has_own_engine and work.kv_tokens
        else 0,
        gradients=trained if work.learns else 0,
        activations=activations,
        logits=rows * part.vocab * storage.compute * (2 if work.learns else 1),
        kv_cache=2 * size.num_layers * size.key_value * work.kv_tokens * storage.compute,
    )


def device_memory(kind: str, processes_per_node: int) -> int:
    """Return the bytes available to one process.

    On a GPU that is the memory of the GPU, on a CPU an equal share of the host's memory or of the
    container's limit.
    """
    if kind == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    import psutil

    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    return total // processes_per_node


def build_on_meta(config: PretrainedConfig, model: schema.Model, kind: Kind) -> PreTrainedModel:
    """Build a model without data. Raises `ConfigError` and `UnknownSizeError`: see `ModelSize`."""
    try:
        with torch.device("meta"):
            return auto_class(kind).from_config(config, trust_remote_code=model.trust_remote_code)
    except (ValueError, ImportError) as error:  # no such class, or a package that it needs
        raise ConfigError(
            f"the model {model.path!r} cannot be built: {_first_line(error)}"
        ) from error
    except (RuntimeError, TypeError, AttributeError) as error:
        # The model's own code computes with values, which the meta device does not have.
        raise UnknownSizeError(
            f"the memory of {model.path!r} is unknown before it is loaded: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _count(module: nn.Module) -> int:
    """Return the number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
