"""What each role will hold on one device, estimated from the model's config alone: no weights are read.

Parameters, gradients and moments are exact. Activations and gathered blocks are estimates of a decoder with a gated feed-forward and an
attention that keeps no scores; fragmentation, the framework's own memory and communication buffers are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes import schema
from rlctl.runtime.model.causal_lm import MAX_LOGITS
from rlctl.runtime.model.load import Kind
from rlctl.runtime.model.lora import add_adapters
from rlctl.runtime.ops import ceil_div
from rlctl.storage import local

_INTERMEDIATE = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "d_ff",
)  # what architectures call the width of their feed-forward layer


class UnknownSizeError(RlctlError):
    """How large a model is cannot be told beforehand."""


@dataclass(frozen=True)
class ModelSize:
    """Of a decoder: sizes of its layers, and how many numbers its parameters are."""

    num_parameters: int
    num_trained: int  # fewer than all with LoRA
    largest_block: int  # parameters of the largest block that FSDP gathers at a time
    outside_blocks: int  # parameters that belong to no block: embeddings, the last norm, the head
    num_layers: int
    hidden: int
    intermediate: int
    query: int  # heads × head size
    key_value: int
    vocab: int

    @classmethod
    def of(cls, model: schema.Model, kind: Kind) -> ModelSize:
        """Built on torch's meta device, where parameters have shapes and no storage; a value function's head is counted.

        Raises:
            ConfigError: transformers cannot build such a model. UnknownSizeError: the model's code does not run without storage.
        """
        config = AutoConfig.from_pretrained(
            local(model.path), trust_remote_code=model.trust_remote_code
        )
        built, text = _build(config, model, kind), config.get_text_config()
        add_adapters(built, model, 0)
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

    @property
    def activations_of_a_token(self) -> int:
        """Numbers that one layer keeps for the backward pass: 6·hidden (residual stream, norms), query, keys, values and their output, and
        4·intermediate (gate, its activation, up, their product)."""
        return 6 * self.hidden + 2 * self.query + 2 * self.key_value + 4 * self.intermediate


@dataclass(frozen=True)
class Storage:
    """How a model lies on the devices: bytes a number, and over how many ranks it is cut."""

    master: int
    compute: int
    shards: int
    wrapped: bool  # by FSDP, which gathers blocks before use
    reshard: bool
    offload: bool

    @classmethod
    def of(
        cls,
        master: torch.dtype,
        compute: torch.dtype,
        ranks: int,
        fsdp: schema.FSDP | schema.FrozenFSDP,
    ) -> Storage:
        wrapped = ranks > 1 or master != compute
        shards = ranks if fsdp.fsdp_size == -1 else min(ranks, fsdp.fsdp_size)
        return cls(
            master.itemsize,
            compute.itemsize,
            shards,
            wrapped,
            fsdp.reshard_after_forward,
            wrapped and fsdp.param_offload,
        )


@dataclass(frozen=True)
class Work:
    """The largest pieces that a role works on at a time, on one rank. 0 where it does no such thing."""

    tokens: int
    learns: bool
    checkpointing: bool
    has_logits: bool
    kv_tokens: int


@dataclass(frozen=True)
class RoleMemory:
    """Bytes on one device. What stands before `gradients` is held throughout; the rest comes and goes."""

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
        return self.parameters + self.moments + self.gathered + self.engine_copy

    @property
    def passing(self) -> int:
        """Generating and learning take turns: the larger of the two."""
        return max(self.kv_cache, self.gradients + self.activations + self.logits)

    @property
    def peak(self) -> int:
        return self.held + self.passing


def role_memory(role: str, size: ModelSize, storage: Storage, work: Work) -> RoleMemory:
    """The plan of one role. With checkpointing each layer keeps its input and one layer at a time keeps all."""
    own, trained = (
        0 if storage.offload else ceil_div(number, storage.shards) * storage.master
        for number in (size.num_parameters, size.num_trained)
    )
    has_own_engine = storage.wrapped or size.num_trained < size.num_parameters
    in_use = (
        2 * size.largest_block + size.outside_blocks if storage.reshard else size.num_parameters
    )
    layer = work.tokens * size.activations_of_a_token * storage.compute
    if not work.learns:
        activations = layer
    elif work.checkpointing:
        activations = size.num_layers * work.tokens * size.hidden * storage.compute + layer
    else:
        activations = size.num_layers * layer
    rows = min(work.tokens, max(1, MAX_LOGITS // size.vocab)) if work.has_logits else 0
    return RoleMemory(
        role=role,
        num_parameters=size.num_parameters,
        num_trained=size.num_trained,
        parameters=own,
        moments=2 * trained if work.learns else 0,
        gathered=min(in_use, size.num_parameters) * storage.compute if storage.wrapped else 0,
        engine_copy=size.num_parameters * storage.compute
        if has_own_engine and work.kv_tokens
        else 0,
        gradients=trained if work.learns else 0,
        activations=activations,
        logits=rows * size.vocab * storage.compute * (2 if work.learns else 1),
        kv_cache=2 * size.num_layers * size.key_value * work.kv_tokens * storage.compute,
    )


def device_memory(kind: str, processes_a_node: int) -> int:
    """Bytes that one process may take: its GPU's memory, or its share of the host's (or the container's) where it computes on the CPU."""
    if kind == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    import psutil

    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    return total // processes_a_node


def _build(config: PretrainedConfig, model: schema.Model, kind: Kind) -> PreTrainedModel:
    auto = AutoModelForCausalLM if kind == "policy" else AutoModel
    try:
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=model.trust_remote_code)
    except (ValueError, ImportError) as error:  # no such class, or a package that it needs
        raise ConfigError(
            f"the model {model.path!r} cannot be built: {_first_line(error)}"
        ) from error
    except (
        RuntimeError,
        TypeError,
        AttributeError,
    ) as error:  # the model's own code computes with numbers that are not there
        raise UnknownSizeError(
            f"the memory that {model.path!r} takes is not known beforehand: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _count(module: nn.Module) -> int:
    """Tied parameters count once."""
    return sum(parameter.numel() for parameter in module.parameters())
